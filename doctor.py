"""`everycast doctor`: what this machine offers and what is missing, as plain records."""

import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from .artifact.cache import cache_dir
from .artifact.errors import ArtifactError, CompileError
from .artifact.host import host_features, host_platform
from .engine.device_runtimes import KINDS
from .engine.devices import DeviceInfo, list_devices
from .engine.memory_plan import available_memory
from .native.build import find_compiler
from .native.wasm_runtime import find_emscripten
from .targets.cuda_compiler import find_cuda_compiler
from .targets.device_linkers import find_amd_linker, find_macos_linker
from .targets.linker import find_linker
from .targets.vulkan.tools import find_tool, missing_tools

GIB = 2**30
MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 2 * GIB

_KERNELS = (
    (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
        "AVX-512 VNNI: int8 dot products, 512 bits wide",
    ),
    (frozenset({"avx512f"}), "AVX-512"),
    (frozenset({"avx2", "fma"}), "AVX2 and FMA (x86-64-v3)"),
    (frozenset({"neon"}), "NEON"),
)
"""CPU features (LLVM's names) → the kernels they select, best first, as `schedules/cpu/isa.py`."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]*[A-Za-z0-9])(?:\[.*\])? *(==|>=) *([^,; ]+)")
"""The form in which `pyproject.toml` states what it needs: a name and one bound."""
_LATER_TARGETS = ("ios", "android")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `fail` means that something needed is wrong."""

    name: str
    status: Literal["ok", "warn", "fail", "info"]
    detail: str


def run_checks() -> list[Check]:
    """All checks, in the order they are shown. None of them raises, none imports the compiler."""
    checks = [_python(), *_packages(), _runtime(), *_linkers()]
    checks += [*_cpu(), _threads(), _memory(), _disk()]
    checks.append(_target_cpu(checks))
    checks += [*_target_gpus(), *_devices()]
    checks += [
        Check(f"target {name}", "info", "not yet in this version") for name in _LATER_TARGETS
    ]
    return checks


def _python() -> Check:
    found = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        return Check("python", "fail", f"{found}; needs {'.'.join(map(str, MIN_PYTHON))} or later")
    return Check("python", "ok", f"{found} ({host_platform()})")


def _packages() -> list[Check]:
    """Installed versions against those this release was tested with (`==` is a must)."""
    try:
        wanted = metadata.requires("everycast") or []
    except metadata.PackageNotFoundError:
        return [Check("everycast", "fail", "not installed; run: pip install -e .")]
    checks = []
    for requirement in wanted:
        if "extra ==" in requirement:
            continue
        pinned = requirement.partition(";")[0].strip()
        match = _REQUIREMENT.fullmatch(pinned)
        assert match is not None, pinned
        name, relation, version = match.groups()
        found = _installed_version(name)
        if found is None:
            checks.append(Check(name, "fail", f"missing; run: pip install '{pinned}'"))
        elif relation == "==" and found != version:
            detail = f"{found}, tested with {version}; run: pip install '{pinned}'"
            checks.append(Check(name, "fail", detail))
        elif relation == ">=" and _release(found) < _release(version):
            detail = f"{found}, needs {version} or later; run: pip install '{pinned}'"
            checks.append(Check(name, "fail", detail))
        else:
            checks.append(Check(name, "ok", found if relation == "==" else f"{found} ({pinned})"))
    if nightly := _installed_version("mlc-ai-nightly"):
        detail = f"{nightly} is installed; it provides `tvm` too and hides the tested one"
        checks.append(Check("mlc-ai-nightly", "warn", detail))
    return checks


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: `0.27.0.post1` → (0, 27, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _runtime() -> Check:
    try:
        from .engine.runtime import load_runtime

        load_runtime()
    except Exception as error:  # any failure to load is the finding
        return Check("tvm runtime", "fail", f"does not load: {error}")
    return Check("tvm runtime", "ok", "loads")


def _cpu() -> list[Check]:
    features = host_features()
    if not features:
        return [Check("cpu", "warn", f"features of this {host_platform()} are not known")]
    chosen = next((text for needed, text in _KERNELS if needed <= features), None)
    if chosen is None:
        detail = "lacks AVX2 and FMA; needs x86-64-v3 (Intel Haswell, AMD Zen, or later) or arm64"
        return [Check("cpu", "fail", detail)]
    present = sorted(features & {name for needed, _ in _KERNELS for name in needed})
    return [Check("cpu", "ok", ", ".join(present)), Check("cpu kernels", "ok", chosen)]


def _target_cpu(checks: list[Check]) -> Check:
    """Whether `--target cpu` works, from the checks of what it needs."""
    needed = ("apache-tvm", "apache-tvm-ffi", "tvm runtime", "linker", "cpu")
    missing = [c.name for c in checks if c.name in needed and c.status == "fail"]
    if missing:
        return Check("target cpu", "fail", f"not without: {', '.join(missing)} (above)")
    return Check("target cpu", "ok", "compiles and runs here")


def _target_gpus() -> list[Check]:
    """Whether libraries for GPUs and browsers can be compiled here, which needs neither."""

    def vulkan() -> str:
        for name in missing_tools():
            find_tool(name)
        find_compiler()  # for the runtime, which also writes the library
        return "kernels as SPIR-V"

    probes: dict[str, Callable[[], str]] = {
        "vulkan": vulkan,
        "cuda": lambda: find_cuda_compiler().description,
        "rocm": lambda: shlex.join(find_amd_linker().command),
        "metal": lambda: shlex.join(find_macos_linker().command),
        "opencl": lambda: "kernels as source",
        "webgpu": lambda: str(find_emscripten()),
    }
    checks = []
    for name, probe in probes.items():
        try:
            checks.append(Check(f"target {name}", "ok", f"compiles ({probe()})"))
        except CompileError as error:
            checks.append(Check(f"target {name}", "info", str(error)))
    return checks


def _devices() -> list[Check]:
    """The devices that libraries can run on here, kind by kind; or why there is none."""
    checks = []
    for kind in KINDS:
        try:
            devices = list_devices(kind)
        except ArtifactError as error:
            checks.append(Check(f"device {kind}", "info", str(error)))
            continue
        for device in devices:
            name = f"device {kind}:{device.index}"
            checks.append(Check(name, "ok", _description(device)))
    return checks


def _description(device: DeviceInfo) -> str:
    free, total = device.free_bytes / GIB, device.total_bytes / GIB
    memory = f"{free:.1f} GiB free of {total:.1f} GiB" if total else ""
    kind = "" if device.is_gpu else "computes on the CPU"
    parts = (device.name, kind, device.driver, memory, ", ".join(device.features))
    return "; ".join(part for part in parts if part)


def _memory() -> Check:
    free = available_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    return Check("memory", "ok" if free >= GIB else "warn", detail)


def _disk() -> Check:
    folder = cache_dir()
    present = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(present).free
    if not os.access(present, os.W_OK):
        return Check("cache", "fail", f"{folder} cannot be written; set EVERYCAST_CACHE")
    detail = f"{folder}: {free / GIB:.1f} GiB free"
    return Check("cache", "ok" if free >= MIN_FREE_BYTES else "warn", detail)


def _linkers() -> list[Check]:
    """What links libraries for this machine, and for arm64 machines (only a bonus)."""
    checks = []
    here = host_platform()
    for where in dict.fromkeys((here, "linux-x86_64", "linux-aarch64")):
        name = "linker" if where == here else f"linker {where}"
        try:
            linker = find_linker(where)
        except CompileError as error:
            checks.append(Check(name, "fail" if where == here else "info", str(error)))
        else:
            checks.append(Check(name, "ok", shlex.join(linker.command)))
    return checks


def _threads() -> Check:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Check("threads", "ok", f"{allowed} of {os.cpu_count()} logical CPUs may be used")
