"""OpenCL: kernels as source, which the device's own driver compiles; phones' GPUs above all."""

import re

import tvm_ffi

from ..schedules.gpu.limits import GpuLimits
from .gpu import choose_arch, gpu_target, refuse_activations, this_machine
from .target import CompileTarget

_LIMITS = GpuLimits(max_threads=256, shared_bytes=32 << 10)
"""What Adreno and Mali GPUs of the last years have."""
_PREAMBLE = "".join(
    f"#define float{n}({args}) ((float{n})({args}))\n"
    for n, args in ((2, "x, y"), (4, "x, y, z, w"))
)
"""TVM writes vectors like C++, `float4(x, y, z, w)`. A macro of that name leaves the type alone."""
_REINTERPRETED = re.compile(r"\(\*\((\w+) \*\)\(&\((\w+)\)\)\)")
"""What TVM writes for the bits of a variable as another type. C leaves open what it does, and
compilers make use of that."""


def make_target(arch: str | None, *, activations: str = "auto") -> CompileTarget:
    """One library for all devices; CompileError for an `arch`, or without a linker."""
    refuse_activations("opencl", activations)
    choose_arch("opencl", arch, {}, "")
    tvm_ffi.register_global_func(
        "tvm_callback_opencl_postproc", lambda source, _: _finished(source), override=True
    )
    spec = {
        "kind": "opencl",
        "max_num_threads": _LIMITS.max_threads,
        "max_threads_per_block": _LIMITS.max_threads,
        "max_shared_memory_per_block": _LIMITS.shared_bytes,
        "thread_warp_size": 1,
    }
    return gpu_target("opencl", spec, _LIMITS, this_machine())


def _finished(source: str) -> str:
    """TVM's source as OpenCL C: vectors, and reinterpretation by `as_float` and its like."""
    return _PREAMBLE + _REINTERPRETED.sub(r"(as_\1(\2))", source)
