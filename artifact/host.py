"""What this process runs on: versions, platform, and CPU features by LLVM's names."""

import functools
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_X86_FEATURES = {
    **{
        flag: flag
        for flag in (
            *("sse", "sse2", "ssse3", "sse4a", "popcnt", "movbe", "avx", "avx2", "fma", "f16c"),
            *("bmi2", "aes", "gfni", "vaes", "vpclmulqdq", "avx512f", "avx512bw", "avx512cd"),
            *("avx512dq", "avx512vl", "avx512ifma", "avx512vbmi"),
        )
    },
    "abm": "lzcnt",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
    "amx_tile": "amx-tile",
    "avx512_bf16": "avx512bf16",
    "avx512_bitalg": "avx512bitalg",
    "avx512_fp16": "avx512fp16",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_vnni": "avx512vnni",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "avx_vnni": "avxvnni",
    "bmi1": "bmi",
    "pclmulqdq": "pclmul",
    "pni": "sse3",
    "sha_ni": "sha",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
}
_ARM_FEATURES = {
    "aes": "aes",
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fullfp16",
    "atomics": "lse",
    "bf16": "bf16",
    "crc32": "crc",
    "fphp": "fullfp16",
    "i8mm": "i8mm",
    "sha2": "sha2",
    "sve": "sve",
    "sve2": "sve2",
}
# Keys of macOS's `sysctl hw.optional`.
_APPLE_FEATURES = {
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.arm.FEAT_FP16": "fullfp16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_LSE": "lse",
    "hw.optional.arm64": "neon",
    "hw.optional.avx1_0": "avx",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.avx512bw": "avx512bw",
    "hw.optional.avx512cd": "avx512cd",
    "hw.optional.avx512dq": "avx512dq",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.avx512vl": "avx512vl",
    "hw.optional.f16c": "f16c",
    "hw.optional.fma": "fma",
    "hw.optional.sse4_2": "sse4.2",
}


@dataclass(frozen=True, slots=True)
class Versions:
    """The releases that a library must have been built by to be loaded."""

    everycast: str
    tvm: str
    tvm_ffi: str


@dataclass(frozen=True, slots=True)
class Host:
    """`platform` is for example `linux-x86_64` or `macos-aarch64`; `cpu_features` is empty where
    they cannot be found out."""

    versions: Versions
    platform: str
    cpu_features: frozenset[str]


@functools.cache
def this_host() -> Host:
    """The running versions and machine."""
    return Host(running_versions(), host_platform(), host_features())


def running_versions() -> Versions:
    """Versions of the installed packages; `not installed` for one that is missing."""
    return Versions(_version("everycast"), _version("apache-tvm"), _version("apache-tvm-ffi"))


def host_platform() -> str:
    """Operating system and processor, as in `linux-x86_64`."""
    system = {"Darwin": "macos"}.get(platform.system(), platform.system().lower())
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return f"{system}-{machine}"


def host_features() -> frozenset[str]:
    """CPU features by LLVM's names, such as `avx512vnni` or `dotprod`; empty if unknown."""
    try:
        if sys.platform == "linux":
            return features_from_cpuinfo(Path("/proc/cpuinfo").read_text(errors="replace"))
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "hw.optional"]
            run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
            return features_from_sysctl(run.stdout)
    except (OSError, subprocess.SubprocessError):
        pass  # an unknown machine is not an error: see Host
    return frozenset()


def known_features(platform: str) -> frozenset[str]:
    """Every feature name that `host_features` can give on `platform` (`linux-x86_64`): a library
    can be held to no other there."""
    if platform.startswith("macos-"):
        return frozenset(_APPLE_FEATURES.values())
    return frozenset((*_X86_FEATURES.values(), *_ARM_FEATURES.values()))


def features_from_cpuinfo(text: str) -> frozenset[str]:
    """Features that every processor of a Linux `/proc/cpuinfo` has (x86 and arm64)."""
    common: set[str] | None = None
    for line in text.splitlines():
        key, _, words = line.partition(":")
        names = {"flags": _X86_FEATURES, "Features": _ARM_FEATURES}.get(key.strip())
        if names is not None:
            found = {names[word] for word in words.split() if word in names}
            common = found if common is None else common & found
    return frozenset(common or ())


def features_from_sysctl(text: str) -> frozenset[str]:
    """Features that macOS reports in `sysctl hw.optional`."""
    found = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if value.strip() == "1" and key in _APPLE_FEATURES:
            found.add(_APPLE_FEATURES[key])
    return frozenset(found)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
