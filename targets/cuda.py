"""CUDA: NVIDIA GPUs. TVM writes CUDA C, nvcc or NVRTC makes machine code of it, without a driver.

Where there is no driver, TVM stores CUDA C in a library, to be compiled when the library is loaded.
Instead the machine code is stored as text (`artifact.machine_code`).
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

import tvm_ffi

from ..artifact.errors import CompileError
from ..artifact.machine_code import OLDEST_CUDA, as_text, from_text
from ..schedules.gpu.limits import GpuLimits, MatrixTile
from .cuda_compiler import find_cuda_compiler
from .gpu import gpu_target, refuse_activations, this_machine
from .target import CompileTarget

_LIMITS = GpuLimits(
    max_threads=1024,
    shared_bytes=48 << 10,
    gemv_tokens=2,
    gemv_passes=1,
    gemv_words=4,
    gemv_stages=3,
    gemv_blocks=256,
    subgroup=32,
    matrix_tiles=(
        MatrixTile(16, 64, 64, 16, 16),
        MatrixTile(32, 64, 64, 16, 32),
        MatrixTile(64, 128, 32, 32, 32),
        MatrixTile(128, 128, 32, 64, 32),
    ),
)
_USUAL = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Ampere to Blackwell: what a library without a named architecture has machine code for."""
_BUSY_THREADS = 384


def make_target(arch: str | None, *, activations: str = "auto") -> CompileTarget:
    """`arch` is a compute capability (`sm_90`), or several by commas; None: machine code for the
    usual ones that the compiler knows. CompileError if one is unknown or too old, or without a
    compiler or a linker."""
    refuse_activations("cuda", activations)
    compiler = find_cuda_compiler()
    known = compiler.architectures()
    chosen = tuple(name for name in _USUAL if name in known)
    if arch is not None:
        chosen = chosen_architectures(arch.split(","), known)

    def compiled(source: str, _: object) -> str:
        return as_text(compiler.compile(with_register_bounds(source), chosen))

    tvm_ffi.register_global_func("tvm_callback_cuda_postproc", compiled, override=True)
    tvm_ffi.register_global_func("tvm_callback_cuda_compile", from_text, override=True)
    spec = {
        "kind": "cuda",
        "arch": chosen[0],
        "max_num_threads": _LIMITS.max_threads,
        "max_threads_per_block": _LIMITS.max_threads,
        "max_shared_memory_per_block": _LIMITS.shared_bytes,
        "thread_warp_size": 32,
    }
    target = gpu_target("cuda", spec, _LIMITS, this_machine())
    return replace(target, constants={**target.constants, "architectures": chosen})


def chosen_architectures(asked: Collection[str], known: Sequence[str]) -> tuple[str, ...]:
    """`asked`, oldest first. CompileError if the compiler, which knows `known` (oldest first), does
    not know one of them, or if it is older than Ampere, whose instructions the kernels use."""
    fitting = [name for name in known if int(name.removeprefix("sm_")) >= OLDEST_CUDA]
    for name in asked:
        if name not in fitting:
            what = "too old an" if name in known else "unknown"
            raise CompileError(
                f"{what} architecture '{name}' for target cuda; "
                f"of those that will do the compiler here knows {', '.join(fitting)}"
            )
    return tuple(name for name in fitting if name in asked)


def with_register_bounds(source: str) -> str:
    """CUDA C whose kernels say how many blocks are enough for a multiprocessor: 384 threads' worth.

        __launch_bounds__(128)     →     __launch_bounds__(128, 3)

    They may use 168 registers a thread then (128 for blocks of 256). Without, ptxas takes fewer to
    fit more blocks in, and spills a few to reach the next step.
    """

    def bounded(found: re.Match[str]) -> str:
        return f"__launch_bounds__({found[1]}, {-(-_BUSY_THREADS // int(found[1]))})"

    return re.sub(r"__launch_bounds__\((\d+)\)", bounded, source)
