"""OpenCL C, compiled by a driver that is here: PoCL, which needs no GPU."""

import importlib.util
import warnings
from typing import Any

from .library import Library, device_kernels
from .programs import first_line
from .report import Finding, KernelUse, ToolMissing

INSTALL = "pip install pyopencl, and as root: apt install pocl-opencl-icd"
HALF = """
#if !defined(cl_khr_fp16) && defined(__FLT16_MAX__)
#define cl_khr_fp16 1
#define half _Float16
#define OVERLOADED __attribute__((overloadable))
typedef half everycast_half4 __attribute__((ext_vector_type(4)));
#define half4 everycast_half4
float OVERLOADED convert_float(half x) { return (float)x; }
half OVERLOADED convert_half(float x) { return (half)x; }
float4 OVERLOADED convert_float4(half4 x) { return (float4)(x.s0, x.s1, x.s2, x.s3); }
half4 OVERLOADED convert_half4(float4 x) { return (half4)(x.s0, x.s1, x.s2, x.s3); }
half OVERLOADED as_half(ushort x) { union { ushort x; half y; } bits = {x}; return bits.y; }
half4 OVERLOADED vload4(size_t i, const __global half* p) {
  return (half4)(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
}
void OVERLOADED vstore4(half4 x, size_t i, __global half* p) {
  p[4 * i] = x.s0; p[4 * i + 1] = x.s1; p[4 * i + 2] = x.s2; p[4 * i + 3] = x.s3;
}
#endif
"""
"""float16 for compilers that know it from C and not as an extension of OpenCL, as PoCL's before
version 4 do: what our kernels do with it."""


def inspect(library: Library) -> Finding:
    """Every kernel, compiled for the first device here. ToolMissing without a driver; ValueError if
    the library holds no kernels."""
    named, stream = device_kernels(library.module("opencl"))
    source = stream.text()
    opencl, device = find_device()
    facts = [f"compiled for {device.name.strip()}"]
    if "cl_khr_fp16" not in device.extensions:
        facts.append("which lacks cl_khr_fp16: float16 is its compiler's own")
    tool = f"{device.platform.name} {device.driver_version}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a log
        try:
            program = opencl.Program(opencl.Context([device]), HALF + source)
            program.build(["-w"], cache_dir=False)
        except opencl.Error as error:
            return Finding(tool, (), tuple(facts), (_first_error(str(error)),))
    info = opencl.kernel_work_group_info
    lengths = _source_lengths(source, named)
    kernels = {
        kernel.function_name: KernelUse(
            kernel.function_name,
            shared_bytes=kernel.get_work_group_info(info.LOCAL_MEM_SIZE, device),
            code_bytes=lengths.get(kernel.function_name),
        )
        for kernel in program.all_kernels()
    }
    faults = tuple(f"it lacks kernel {name}" for name in named if name not in kernels)
    return Finding(tool, tuple(kernels.values()), tuple(facts), faults)


def find_device() -> tuple[Any, Any]:
    """(pyopencl, the first OpenCL device); ToolMissing, with what brings it, if there is none."""
    if importlib.util.find_spec("pyopencl") is None:
        raise ToolMissing(f"OpenCL kernels are compiled by a driver; run: {INSTALL}")
    import pyopencl

    try:
        devices = [d for platform in pyopencl.get_platforms() for d in platform.get_devices()]
    except pyopencl.Error:
        devices = []
    if not devices:
        raise ToolMissing(f"this machine has no OpenCL driver; run: {INSTALL}")
    return pyopencl, devices[0]


def _source_lengths(source: str, names: list[str]) -> dict[str, int]:
    """Characters of each kernel: TVM writes `// Function: NAME` before each."""
    lengths = {}
    for part in source.split("// Function: ")[1:]:
        name, _, rest = part.partition("\n")
        if name in names:
            lengths[name] = len(rest)
    return lengths


def _first_error(log: str) -> str:
    lines = [line for line in log.splitlines() if "error:" in line]
    return first_line(lines[0] if lines else log)
