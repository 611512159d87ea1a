"""`everycast doctor`: what this machine offers and what is missing, as plain records."""

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from .artifact.cache import cache_dir
from .artifact.host import host_features, host_platform
from .engine.memory_plan import available_memory

GIB = 2**30
MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 2 * GIB

_KERNELS = (
    ("avx512vnni", "AVX-512 VNNI: int8 dot products, 512 bits wide"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2 and FMA (x86-64-v3)"),
    ("i8mm", "NEON int8 matrix products"),
    ("dotprod", "NEON int8 dot products"),
    ("neon", "NEON"),
)
"""CPU feature (LLVM's name) → the kernels it selects, best first."""
_LATER_TARGETS = ("cuda", "rocm", "metal", "vulkan", "webgpu", "ios", "android")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `fail` means that something needed is wrong."""

    name: str
    status: Literal["ok", "warn", "fail", "info"]
    detail: str


def run_checks() -> list[Check]:
    """All checks, in the order they are shown. None of them raises, none imports the compiler."""
    checks = [_python(), *_packages(), _runtime(), _linker()]
    checks += [*_cpu(), _threads(), _memory(), _disk()]
    checks.append(Check("target cpu", "ok", "compiles and runs here"))
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
        name, is_exact, version = pinned.partition("==")
        name = name.partition("[")[0].rstrip(" <>=!~0123456789.,") if not is_exact else name.strip()
        found = _installed_version(name)
        if found is None:
            checks.append(Check(name, "fail", f"missing; run: pip install '{pinned}'"))
        elif is_exact and found != version:
            detail = f"{found}, tested with {version}; run: pip install '{pinned}'"
            checks.append(Check(name, "fail", detail))
        else:
            checks.append(Check(name, "ok", found if is_exact else f"{found} ({pinned})"))
    if nightly := _installed_version("mlc-ai-nightly"):
        detail = f"{nightly} is installed; it provides `tvm` too and hides the tested one"
        checks.append(Check("mlc-ai-nightly", "warn", detail))
    return checks


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
    chosen = next((text for feature, text in _KERNELS if feature in features), None)
    if chosen is None:
        return [Check("cpu", "fail", "needs x86-64-v3 (AVX2 and FMA) or arm64 with NEON")]
    present = [feature for feature, _ in _KERNELS if feature in features]
    return [Check("cpu", "ok", ", ".join(present)), Check("cpu kernels", "ok", chosen)]


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


def _linker() -> Check:
    """What links a library: the first that TVM would take."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "gcc", "clang", "cc"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        return Check("linker", "fail", "none found; compiling needs one: install g++ or clang")
    return Check("linker", "ok", found)


def _threads() -> Check:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Check("threads", "ok", f"{allowed} of {os.cpu_count()} logical CPUs may be used")
