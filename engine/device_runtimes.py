"""What makes TVM know a kind of device: libraries of TVM's wheel, or everycast's own for Vulkan."""

import ctypes
import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from ..artifact.errors import ArtifactError, CompileError
from ..artifact.machine_code import from_text
from ..native.vulkan_runtime import load_vulkan_runtime
from .runtime import load_runtime
from .tvm_runtime import runtime_file, tvm_ffi

_CUDA_RUNTIME = "libcudart.so.13"
"""What TVM's wheel is linked with."""
_OLDEST_CUDA_DRIVER = "580"
"""NVIDIA's first driver for CUDA 13."""
_NO_DEVICE, _OLD_DRIVER = 100, 35
"""Of `cudaError` in driver_types.h."""


@functools.cache
def load_device_runtime(kind: str) -> None:
    """Let TVM use devices of `kind` (TVM's name, such as `cuda`), once.

    Raises ArtifactError, one line that says what to install, where something is missing.
    """
    load_runtime()
    _LOADERS[kind]()


def _load_cuda() -> None:
    """Machine code in a library is text to TVM, which it gives to the function registered here."""
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    except OSError:
        raise ArtifactError(
            "cannot run on cuda: this machine has no NVIDIA driver (libcuda.so.1); install it, or "
            "run on another device"
        ) from None
    runtime = _load_cuda_runtime()
    count = ctypes.c_int(0)
    error = runtime.cudaGetDeviceCount(ctypes.byref(count))
    if error == _OLD_DRIVER:
        raise ArtifactError(
            f"cannot run on cuda: NVIDIA's driver here is for {cuda_driver()}, but TVM needs "
            f"CUDA 13.0; install driver {_OLDEST_CUDA_DRIVER} or later"
        )
    if error == _NO_DEVICE or (error == 0 and count.value == 0):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is '{visible}')"
        raise ArtifactError(f"cannot run on cuda: NVIDIA's driver finds no device here{reason}")
    if error != 0:
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        what = runtime.cudaGetErrorString(error).decode(errors="replace")
        raise ArtifactError(f"cannot run on cuda: NVIDIA's driver says '{what}' (error {error})")
    _load_part("cuda")
    tvm_ffi.register_global_func(
        "tvm_callback_cuda_compile", lambda text: from_text(str(text)), override=True
    )


def cuda_driver() -> str:
    """The CUDA version that NVIDIA's driver is for, such as `CUDA 13.0`."""
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _load_cuda_runtime() -> ctypes.CDLL:
    """From where the system's loader looks, NVIDIA's Python packages, or a toolkit."""
    packages = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "lib")
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [Path(home, "lib64") for home in homes if home]
    for place in (None, packages, *folders, Path("/usr/local/cuda/lib64")):
        path = _CUDA_RUNTIME if place is None else str(place / _CUDA_RUNTIME)
        try:
            return ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    raise ArtifactError(
        f"cannot run on cuda: {_CUDA_RUNTIME} is not installed; run: "
        "pip install 'nvidia-cuda-runtime>=13,<14'"
    )


def _load_vulkan() -> None:
    if sys.platform.startswith("linux"):
        try:  # before a runtime is compiled for nothing
            ctypes.CDLL("libvulkan.so.1")
        except OSError:
            raise ArtifactError(
                "cannot run on vulkan: this machine has no Vulkan loader (libvulkan.so.1); install "
                "the driver of the GPU, or on Debian: apt install libvulkan1 mesa-vulkan-drivers"
            ) from None
    try:
        load_vulkan_runtime()
    except CompileError as error:
        raise ArtifactError(f"cannot run on vulkan: {error}") from None


def _load_part(kind: str) -> None:
    """A library beside TVM's own, if this wheel has it and it is not already known."""
    if tvm_ffi.get_global_func(f"device_api.{kind}", True) is not None:
        return
    path = _part(kind)
    if path is None or not path.is_file():
        raise ArtifactError(
            f"cannot run on {kind}: the apache-tvm that is installed has no runtime for it; a "
            f"library for {kind} can be compiled here, not run"
        )
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ArtifactError(f"cannot run on {kind}: its runtime does not load: {error}") from None


def has_runtime(kind: str) -> bool:
    """Whether devices of `kind` could be used here, were there any: nothing is loaded."""
    if kind == "vulkan":
        return True
    path = _part(kind)
    return path is not None and path.is_file()


def _part(kind: str) -> Path | None:
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "lib" / runtime_file(kind)


_LOADERS: Mapping[str, Callable[[], None]] = {
    "cuda": _load_cuda,
    "rocm": lambda: _load_part("rocm"),
    "metal": lambda: _load_part("metal"),
    "vulkan": _load_vulkan,
    "opencl": lambda: _load_part("opencl"),
}
KINDS = tuple(_LOADERS)
"""Kinds of devices beside the CPU, best first."""
