"""Metal: Apple GPUs. The library is a .dylib with kernels as Metal source, made on any machine."""

from ..schedules.gpu.limits import GpuLimits, MatrixTile
from .device_linkers import MACOS, find_macos_linker
from .gpu import Host, choose_arch, gpu_target, refuse_activations
from .target import CompileTarget

_LIMITS = GpuLimits(
    max_threads=256,
    shared_bytes=32 << 10,
    gemv_words=4,
    gemv_blocks=64,
    subgroup=32,
    matrix_tiles=(
        MatrixTile(16, 64, 32, 16, 32),
        MatrixTile(32, 64, 32, 16, 32),
        MatrixTile(64, 64, 32, 32, 32),
    ),
    matrix_unit="simdgroup",
    matrix_blocks=32,
)
"""All of Apple's GPUs have SIMD groups of 32; those of Macs, and of phones since the A14, multiply
8 x 8 matrices. Tiles take 20 KB of threadgroup memory at most."""


def make_target(arch: str | None, *, activations: str = "auto") -> CompileTarget:
    """One library for all Macs with Apple's processors; CompileError for an `arch`, or without a
    linker for macOS."""
    refuse_activations("metal", activations)
    choose_arch("metal", arch, {}, "")
    spec = {
        "kind": "metal",
        "thread_warp_size": 32,
        "max_num_threads": _LIMITS.max_threads,
        "max_threads_per_block": _LIMITS.max_threads,
        "max_shared_memory_per_block": _LIMITS.shared_bytes,
    }
    host = Host(MACOS, find_macos_linker().link)
    return gpu_target("metal", spec, _LIMITS, host, library_suffix="dylib")
