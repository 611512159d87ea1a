"""Kernels compiled for Vulkan and run on this machine's device, which may be Mesa's CPU driver."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from everycast.artifact.dtypes import numpy_dtype
from everycast.artifact.errors import EverycastError
from everycast.artifact.tensor_format import TensorFormat
from everycast.native.vulkan_runtime import load_vulkan_runtime
from everycast.quant_schemes.bits import pack_values
from everycast.schedules.gpu.limits import GemmTile, GpuLimits
from everycast.schedules.pipeline import GPU_TIR_PIPELINE
from everycast.targets.vulkan.target import make_target

LIMITS = {
    "usual": GpuLimits(max_threads=256, shared_bytes=32 << 10),
    # What Vulkan promises, and shapes of work that divide nothing evenly.
    "least": GpuLimits(
        max_threads=128, shared_bytes=16 << 10, gemv_threads=64, gemv_lanes=16, gemv_columns=3,
        gemv_tokens=3, gemm_tiles=(GemmTile(12, 40, 16, 3, 5), GemmTile(24, 40, 16, 3, 5)),
        attention_threads=96, attention_rows=7, attention_splits=5,
    ),
}  # fmt: skip


@functools.cache
def vulkan():
    """(target, device), or why there is none."""
    try:
        load_vulkan_runtime()
        target = tvm.target.Target(make_target(None).spec)
        device = tvm.device("vulkan", 0)
        return (target, device) if device.exist else "this machine has no Vulkan device"
    except (EverycastError, RuntimeError) as error:
        return f"Vulkan does not run here: {str(error).splitlines()[-1]}"


@pytest.fixture(scope="session")
def vulkan_device():
    """(TVM's target, TVM's device)."""
    found = vulkan()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def build(func):
    target, _ = vulkan()
    executable = tvm.compile(func, target=target, tir_pipeline=GPU_TIR_PIPELINE)
    return executable[func.attrs["global_symbol"]]


def random_parts(fmt: TensorFormat, n: int, k: int, rng):
    if fmt.bits is None:
        return {"weight": rng.standard_normal((n, k)).astype(numpy_dtype(fmt.dtype))}
    parts = pack_values(rng.integers(0, 1 << fmt.bits, (n, k), dtype=np.uint8), fmt)
    for part in ("q_scale", "q_min"):
        if part in fmt.parts(n, k):
            shape, dtype = fmt.parts(n, k)[part]
            parts[part] = rng.standard_normal(shape).astype(numpy_dtype(dtype))
    return parts


@pytest.fixture(name="random_parts", scope="session")
def random_parts_fixture():
    """`random_parts(format, n, k, rng)`: the parts of a random weight."""
    return random_parts


@pytest.fixture(params=LIMITS)
def gpu(request):
    """`run(func, inputs, outputs)`: arrays in, the filled outputs out; `limits`, `rng`."""
    found = vulkan()
    if isinstance(found, str):
        pytest.skip(found)
    _, device = found

    def tensor(array):
        return tvm.runtime.tensor(np.ascontiguousarray(array), device)

    def run(func, *args):
        """Call `func` with arrays (and numbers); every array as it is afterwards."""
        given = [tensor(a) if isinstance(a, np.ndarray) else a for a in args]
        build(func)(*given)
        return [
            t.numpy() if isinstance(a, np.ndarray) else a for a, t in zip(args, given, strict=True)
        ]

    return SimpleNamespace(
        run=run, limits=LIMITS[request.param], rng=np.random.default_rng(0),
        random_parts=random_parts,
    )  # fmt: skip
