"""The kernels' own tests, with OpenCL C that PoCL compiles and runs on the CPU.

There is no OpenCL runtime in TVM's wheel, and none is needed: the host part of a kernel, which
chooses and launches, is compiled for the CPU, and finds each launch as a global function here.
"""

import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from everycast.schedules.gpu.limits import GpuLimits
from everycast.schedules.pipeline import GPU_TIR_PIPELINE
from everycast.targets.inspection.opencl import HALF, find_device
from everycast.targets.inspection.report import ToolMissing
from everycast.targets.opencl import make_target
from host_on_cpu import launch_axes, split, tensor_of, view_of
from tvm import tirx
from tvm.target import codegen

LIMITS = GpuLimits(max_threads=256, shared_bytes=32 << 10)
OPTIONS = ["-w", "-cl-opt-disable"]
"""PoCL 3.1's optimizer loses what a thread has in an array, in attention with heads of 40: barriers
that change nothing, or `volatile`, mend it, as does leaving it out."""
AXES = tuple(f"{kind}.{axis}" for kind in ("blockIdx", "threadIdx") for axis in "xyz")


@functools.cache
def device():
    """(pyopencl, its queue), or why there is none."""
    try:
        opencl, found = find_device()
    except ToolMissing as error:
        return str(error)
    return opencl, opencl.CommandQueue(opencl.Context([found]))


class Kernels:
    """The kernels of one function, compiled; `run(*arguments)` calls it."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.opencl, self.queue = device()
        self.name = str(func.attrs["global_symbol"])
        source, self.host, self.axes = build(func)
        program = self.opencl.Program(self.queue.context, HALF + source)
        self.kernels = {
            kernel.function_name: kernel
            for kernel in program.build(OPTIONS, cache_dir=False).all_kernels()
        }
        self.parameters = {name: parameters(source, name) for name in self.kernels}
        for name in self.kernels:
            launch = functools.partial(self.launch, name)
            tvm_ffi.register_global_func(name, launch, override=True)

    def run(self, *arguments: Any) -> list[Any]:
        """Every array as it is afterwards."""
        tensors = [tensor_of(a) if isinstance(a, np.ndarray) else a for a in arguments]
        self.arrays = {
            tensor.data_ptr(): view_of(tensor, array)
            for tensor, array in zip(tensors, arguments, strict=True)
            if isinstance(array, np.ndarray)
        }
        self.host[self.name](*tensors)
        return [
            view_of(tensor, array).copy() if isinstance(array, np.ndarray) else array
            for tensor, array in zip(tensors, arguments, strict=True)
        ]

    def launch(self, name: str, *values: Any) -> None:
        kernel, axes = self.kernels[name], self.axes[name]
        sizes = dict.fromkeys(AXES, 1) | dict(zip(axes, values[-len(axes) :], strict=True))
        blocks, threads = [int(sizes[a]) for a in AXES[:3]], [int(sizes[a]) for a in AXES[3:]]
        buffers = []
        flags = self.opencl.mem_flags
        for i, value in enumerate(values[: len(values) - len(axes)]):
            if (scalar := self.parameters[name][i]) is not None:
                kernel.set_arg(i, scalar(value))
                continue
            array = self.arrays[getattr(value, "value", value)]
            copied = flags.READ_WRITE | flags.COPY_HOST_PTR
            buffers.append((array, self.opencl.Buffer(self.queue.context, copied, hostbuf=array)))
            kernel.set_arg(i, buffers[-1][1])
        total = [b * t for b, t in zip(blocks, threads, strict=True)]
        self.opencl.enqueue_nd_range_kernel(self.queue, kernel, total, threads)
        for array, buffer in buffers:
            self.opencl.enqueue_copy(self.queue, array, buffer)
        self.queue.finish()


def parameters(source: str, kernel: str) -> list[type | None]:
    """Types of a kernel's arguments; None for a buffer."""
    (declared,) = re.findall(
        rf"__kernel void (?:__attribute__\(.*?\)\) )?{kernel}\((.*)\) {{", source
    )
    scalars = {"int": np.int32, "long": np.int64, "float": np.float32}
    return [None if "*" in p else scalars[p.split()[0]] for p in declared.split(",")]


def build(func: tirx.PrimFunc) -> tuple[str, Any, dict[str, list[str]]]:
    """(OpenCL C, the host part as a module for the CPU, kernel → its launch axes)."""
    target, cpu = tvm.target.Target(make_target(None).spec), tvm.target.Target({"kind": "llvm"})
    module = tvm.IRModule({func.attrs["global_symbol"]: func})
    module = tirx.transform.BindTarget(target)(module)
    pipeline, finish_host, finish_device = tirx.get_tir_pipeline(GPU_TIR_PIPELINE)
    host, on_device = split(pipeline, module, cpu)
    on_device = finish_device()(on_device)
    source = codegen.build_module(on_device, target).inspect_source()
    return source, codegen.build_module(finish_host()(host), cpu), launch_axes(on_device)


@pytest.fixture(scope="session")
def kernel_tests():
    """`kernel_tests(name)`: a module of tests/schedules/gpu."""

    @functools.cache
    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[2] / "schedules" / "gpu" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"gpu_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@functools.cache
def compiled(func: tirx.PrimFunc) -> Kernels:
    return Kernels(func)


@pytest.fixture
def gpu(kernel_tests):
    """What tests/schedules/gpu has under this name, on PoCL."""
    if isinstance(found := device(), str):
        pytest.skip(found)
    return SimpleNamespace(
        run=lambda func, *arguments: compiled(func).run(*arguments),
        limits=LIMITS,
        rng=np.random.default_rng(0),
        random_parts=kernel_tests("conftest").random_parts,
    )
