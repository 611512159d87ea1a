"""A small model's kernels as CUDA and Metal get them, emulated; linear layers: `test_gemm.py`."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.group import dequantize
from everycast.schedules.gpu.attention import attention
from everycast.schedules.gpu.attention_block import AttentionShape
from everycast.schedules.gpu.embedding import embedding
from everycast.schedules.gpu.limits import GpuLimits
from everycast.schedules.gpu.norm import rms_norm, take_rows
from everycast.schedules.gpu.rotary import rotary_table, rotate_and_append
from everycast.schedules.gpu.weight import GpuWeight

LIMITS = GpuLimits(max_threads=1024, shared_bytes=32 << 10, subgroup=32)
SIZE, WINDOW = 100, 7
SHAPE = AttentionShape(6, 2, 16, 16, "float16")
TABLES = {
    "q8": GpuWeight(TensorFormat("float16", 8, 32, 127), 37, SIZE),
    "bfloat16": GpuWeight(TensorFormat("bfloat16"), 37, SIZE),
}
FUNCTIONS = [
    rms_norm(SIZE, 1e-5, False, LIMITS),
    rms_norm(SIZE, 1e-5, True, LIMITS),
    take_rows(SIZE, LIMITS),
    rotary_table(20, 1.25, LIMITS),
    *(embedding(table, 1.5, LIMITS) for table in TABLES.values()),
    rotate_and_append(
        num_heads=6, num_kv_heads=2, head_dim=16, rotary_dim=12, page_size=16,
        kv_dtype="float16", limits=LIMITS,
    ),
    attention(SHAPE, 0.25, None, LIMITS),
    attention(SHAPE, 0.25, WINDOW, LIMITS),
]  # fmt: skip


@pytest.fixture(scope="module", params=["cuda", "metal"])
def gpu(request):
    """In place of a Vulkan device."""
    program = request.getfixturevalue(f"{request.param}_emulator").Emulated(FUNCTIONS)

    def run(func, *arguments):
        return program.run(str(func.attrs["global_symbol"]), *arguments)

    yield SimpleNamespace(run=run, limits=LIMITS, rng=np.random.default_rng(0))
    program.close()


@pytest.fixture(scope="module")
def oracle():
    """test_attention.py: batches, and what attention makes of them."""
    path = Path(__file__).with_name("test_attention.py")
    spec = importlib.util.spec_from_file_location("attention_oracle", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(gpu, has_residual):
    x, residual = gpu.rng.standard_normal((2, 5, SIZE)).astype("float32")
    weight = gpu.rng.standard_normal(SIZE).astype("float32")
    tensors = [x, weight, *([residual] if has_residual else [])]
    *_, y = gpu.run(FUNCTIONS[has_residual], *tensors, np.zeros_like(x))
    expected = x / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(y, expected + has_residual * residual, atol=1e-5)


def test_take_rows(gpu):
    x = gpu.rng.standard_normal((9, SIZE)).astype("float32")
    rows = np.array([3, 0, 8, 8, 1], "int32")
    *_, y = gpu.run(FUNCTIONS[2], x, rows, np.zeros((5, SIZE), "float32"))
    np.testing.assert_array_equal(y, x[rows])


def test_rotary_table(gpu):
    positions = np.array([0, 1, 7, 100, 4095, 131_071], "int32")
    inv_freq = (500_000.0 ** (-np.arange(20) / 20)).astype("float32")
    *_, table = gpu.run(FUNCTIONS[3], positions, inv_freq, np.zeros((6, 40), "float32"))
    angles = positions[:, None].astype(float) * inv_freq
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * 1.25
    assert (np.abs(table - expected) < 2e-6 + positions[:, None] * 2.0**-23).all()


@pytest.mark.parametrize("name", TABLES)
def test_embedding(gpu, random_parts, name):
    table = TABLES[name]
    parts = random_parts(table.format, table.n, SIZE, gpu.rng)
    ordered = [parts[part] for part in table.format.parts(table.n, SIZE)]
    ids = np.array([0, 36, 5, 5, 17], "int32")
    func = FUNCTIONS[4 + list(TABLES).index(name)]
    *_, y = gpu.run(func, ids, *ordered, np.zeros((5, SIZE), "float32"))
    matrix = dequantize(parts, table.format, table.n, SIZE)
    np.testing.assert_allclose(y, matrix[ids] * 1.5, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    "sequences", [((0, 1), (40, 1)), ((0, 18), (17, 20), (40, 3), (31, 1)), ((520, 1), (5, 1))]
)
def test_append_and_attention(gpu, oracle, sequences, window):
    """Decode steps, prefill chunks, and contexts that are split among blocks."""
    batch = oracle.Batch(SHAPE, 12, gpu.rng, sequences)
    inputs = (batch.q, batch.k, batch.v, batch.rotary, batch.slots, batch.pages)
    *_, pages, _, q = gpu.run(FUNCTIONS[6], *inputs, oracle.LAYER, np.zeros_like(batch.q))
    expected_q = batch.rotated(batch.q, SHAPE.num_heads)
    np.testing.assert_allclose(q.reshape(expected_q.shape), expected_q, atol=1e-5)
    appended = batch.appended().astype("float32")
    np.testing.assert_allclose(pages.astype("float32"), appended, atol=5e-3)
    out, expected = oracle.attend(gpu, batch, q, pages, 0.25, window)
    np.testing.assert_allclose(out, expected, atol=2e-5)
