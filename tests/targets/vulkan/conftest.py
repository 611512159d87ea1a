"""A Vulkan device, and kernels compiled for it and run on it."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tvm
from everycast.artifact.errors import EverycastError
from everycast.artifact.tensor_cache import aligned_empty
from everycast.engine.devices import DeviceMemory
from everycast.targets.vulkan.module import register
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as B

SPEC = {
    "kind": "vulkan", "thread_warp_size": 8, "max_num_threads": 256, "max_threads_per_block": 256,
    "max_shared_memory_per_block": 32768, "supports_float16": True, "supports_int8": True,
    "supports_int16": True, "supports_int64": True, "supports_8bit_buffer": True,
    "supports_16bit_buffer": True,
    "host": {"kind": "llvm"},
}  # fmt: skip


@pytest.fixture(scope="session")
def memory() -> DeviceMemory:
    """The device; skips where there is none."""
    try:
        return DeviceMemory("vulkan")
    except EverycastError as error:
        pytest.skip(f"no Vulkan device: {error}")


def compile_function(function: tirx.PrimFunc) -> Any:
    """The runtime module of one function that launches kernels."""
    register()
    target = tvm.target.Target(SPEC)
    module = tvm.IRModule({function.attrs["global_symbol"]: function})
    return tvm.compile(module, target=target)


class Runner:
    """Runs functions on the device; arrays are copied there, and back afterwards."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory

    def __call__(self, function: Any, *arguments: Any) -> None:
        """Arrays in `arguments` hold, afterwards, what the kernel left in them."""
        if isinstance(function, tirx.PrimFunc):
            function = compile_function(function)[str(function.attrs["global_symbol"])]
        tensors = [
            self.memory.upload(np.ascontiguousarray(a), str(a.dtype))
            if isinstance(a, np.ndarray)
            else a
            for a in arguments
        ]
        function(*tensors)
        for argument, tensor in zip(arguments, tensors, strict=True):
            if isinstance(argument, np.ndarray) and argument.size:
                host = aligned_empty(argument.shape, argument.dtype)
                self.memory.download(tensor, host)
                argument[...] = host


@pytest.fixture(scope="session")
def run(memory: DeviceMemory) -> Runner:
    return Runner(memory)


@contextmanager
def _launch(sizes: Sequence[tuple[str, Any]]):
    """Nested threads: yields their indices."""
    if not sizes:
        yield []
        return
    (tag, extent), *rest = sizes
    with B.launch_thread(tag, extent) as index, _launch(rest) as others:
        yield [index, *others]


def make_kernel(
    name: str,
    buffers: Sequence[tuple[Sequence[int], str]],
    body: Callable[..., None],
    *,
    sizes: Sequence[tuple[str, Any]] = (("blockIdx.x", 1), ("threadIdx.x", 1)),
    scalars: Sequence[str] = (),
) -> tirx.PrimFunc:
    """A function that launches one kernel: `body(buffers, scalars, indices)` emits it."""
    with IRBuilder() as ib:
        with B.prim_func(s_tir=True):
            B.func_name(name)
            B.func_attr({"tirx.noalias": True, "global_symbol": name})
            arrays = [
                B.match_buffer(B.arg(f"b{i}", B.handle()), list(shape), dtype)
                for i, (shape, dtype) in enumerate(buffers)
            ]
            numbers = [B.arg(f"n{i}", getattr(B, dtype)()) for i, dtype in enumerate(scalars)]
            with B.sblock("root"):
                B.reads()
                B.writes()
                with _launch(
                    [(tag, size(numbers) if callable(size) else size) for tag, size in sizes]
                ) as indices:
                    body(arrays, numbers, indices)
        return ib.get()


@pytest.fixture(scope="session")
def kernel() -> Callable[..., tirx.PrimFunc]:
    """`make_kernel`."""
    return make_kernel


@pytest.fixture(scope="session")
def compiled() -> Callable[[tirx.PrimFunc], Any]:
    """`compile_function`."""
    return compile_function
