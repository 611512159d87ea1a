"""Vulkan 1.2: kernels as SPIR-V, which any driver takes. Runs on GPUs and, by Mesa, on CPUs."""

from typing import Any

from ...artifact.errors import CompileError
from ...native.vulkan_runtime import load_vulkan_runtime
from ...schedules.gpu.limits import GpuLimits
from ..gpu import choose_arch, gpu_target, refuse_activations, this_machine
from ..target import CompileTarget
from .module import register
from .tools import find_tool, missing_tools

# What desktop, laptop and most mobile GPUs have; Vulkan itself promises 128 threads, 16 KiB.
_LIMITS = GpuLimits(max_threads=256, shared_bytes=32 << 10)
_SPEC: dict[str, Any] = {
    "kind": "vulkan",
    "max_num_threads": _LIMITS.max_threads,
    "max_threads_per_block": _LIMITS.max_threads,
    "max_shared_memory_per_block": _LIMITS.shared_bytes,
    "thread_warp_size": 1,
    "supports_float16": True,
    "supports_int16": True,
    "supports_int64": True,
    "supports_16bit_buffer": True,
    "supports_storage_buffer_storage_class": True,
}


def make_target(arch: str | None, *, activations: str = "auto") -> CompileTarget:
    """One library for all devices; CompileError for an `arch`, or without a linker, the tools that
    make SPIR-V, or what compiles the runtime, which writes the library."""
    refuse_activations("vulkan", activations)
    choose_arch("vulkan", arch, {}, "")
    for name in missing_tools():
        find_tool(name)  # says what brings it
    try:
        load_vulkan_runtime()
    except CompileError as error:
        raise CompileError(f"target vulkan needs its runtime, but {error}") from None
    register()
    return gpu_target("vulkan", _SPEC, _LIMITS, this_machine())
