from dataclasses import replace

import numpy as np
import pytest
from everycast.artifact.errors import CompileError
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.group import dequantize
from everycast.quant_schemes.scheme import SCHEMES
from everycast.schedules.gpu.embedding import embedding
from everycast.schedules.gpu.limits import GpuLimits
from everycast.schedules.gpu.linear import linear
from everycast.schedules.gpu.linear_operator import LinearOperator
from everycast.schedules.gpu.linear_schedule import default_schedule
from everycast.schedules.gpu.row_parts import row_parts
from everycast.schedules.gpu.weight import GpuWeight

FORMATS = {
    **{f"{name}": scheme.linear for name, scheme in SCHEMES.items()},
    "q4_1": TensorFormat("float32", 4, 32),
    "q5_0": TensorFormat("float16", 5, 32, 16),
    "q6_k": TensorFormat("float32", 6, 16, 32),
}
UNIQUE = {fmt: name for name, fmt in reversed(FORMATS.items())}
CASES = [pytest.param(fmt, id=name) for fmt, name in UNIQUE.items()]
SHAPES = ((37, 100), (8, 320))
ROWS = (1, 2, 5, 8, 9, 33)
"""On both sides of where one kernel hands over to the next."""


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relative_error(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


def weights(gpu, fmt, n, k, count):
    """(GpuWeight, [the parts as arguments], [n, k] float64) of each."""
    made = []
    for _ in range(count):
        parts = gpu.random_parts(fmt, n, k, gpu.rng)
        ordered = [parts[name] for name in fmt.parts(n, k)]
        made.append((GpuWeight(fmt, n, k), ordered, dequantize(parts, fmt, n, k).astype(float)))
    return made


@pytest.mark.parametrize("fmt", CASES)
def test_linear_with_bias_and_residual(gpu, fmt):
    for n, k in SHAPES:
        ((weight, parts, matrix),) = weights(gpu, fmt, n, k, 1)
        func = linear(LinearOperator((weight,), (True,), residual=True), gpu.limits)
        bias = gpu.rng.standard_normal(n).astype("float32")
        for rows in ROWS:
            x = gpu.rng.standard_normal((rows, k)).astype("float32")
            residual = gpu.rng.standard_normal((rows, n)).astype("float32")
            *_, y = gpu.run(func, x, *parts, bias, residual, np.full((rows, n), 7, "float32"))
            assert relative_error(y, x @ matrix.T + bias + residual) < 1e-5, (n, k, rows)


@pytest.mark.parametrize("fmt", [FORMATS["q4f16_1"], FORMATS["q0f16"], FORMATS["q6_k"]])
def test_a_schedule_of_its_own_for_each_number_of_rows(gpu, fmt):
    n, k = SHAPES[0]
    ((weight, parts, matrix),) = weights(gpu, fmt, n, k, 1)
    schedule = default_schedule(gpu.limits)
    for bucket, parameters in (
        ("one", {"shares_memory": 0, "register_threads": 8}),
        ("few", {"gemv_words": 4, "gemv_tokens": 2, "gemv_passes": 3}),
        ("many", {"shares_memory": 0, "register_rows": 4, "register_columns": 8}),
    ):
        schedule = schedule.with_parameters(bucket, parameters)
    func = linear(LinearOperator((weight,), (False,)), gpu.limits, schedule)
    for rows in ROWS:
        x = gpu.rng.standard_normal((rows, k)).astype("float32")
        *_, y = gpu.run(func, x, *parts, np.full((rows, n), 7, "float32"))
        assert relative_error(y, x @ matrix.T) < 1e-5, rows


@pytest.mark.parametrize("activation", [silu, gelu_tanh])
@pytest.mark.parametrize("fmt", [FORMATS["q4f16_1"], FORMATS["q4f16_0"], FORMATS["q3f16_1"]])
def test_gated(gpu, fmt, activation):
    n, k = SHAPES[0]
    (gate, gate_parts, gate_matrix), (up, up_parts, up_matrix) = weights(gpu, fmt, n, k, 2)
    operator = LinearOperator((gate, up), (False, True), activation=activation.__name__)
    func = linear(operator, gpu.limits)
    bias = gpu.rng.standard_normal(n).astype("float32")
    for rows in ROWS:
        x = gpu.rng.standard_normal((rows, k)).astype("float32") * 0.1
        *_, y = gpu.run(func, x, *gate_parts, *up_parts, bias, np.zeros((rows, n), "float32"))
        expected = activation(x @ gate_matrix.T) * (x @ up_matrix.T + bias)
        assert relative_error(y, expected) < 1e-5, rows


@pytest.mark.parametrize("activation", [silu, gelu_tanh])
def test_gate_that_was_computed_before(gpu, activation):
    n, k = SHAPES[0]
    ((up, parts, matrix),) = weights(gpu, FORMATS["q6_k"], n, k, 1)
    operator = LinearOperator((up,), (True,), residual=True, activation=activation.__name__)
    func, bias = linear(operator, gpu.limits), gpu.rng.standard_normal(n).astype("float32")
    for rows in ROWS:
        x = gpu.rng.standard_normal((rows, k)).astype("float32") * 0.1
        gate = gpu.rng.standard_normal((rows, n)).astype("float32")
        *_, y = gpu.run(func, x, *parts, bias, gate, np.zeros((rows, n), "float32"))
        assert relative_error(y, activation(gate) * (x @ matrix.T + bias)) < 1e-5, rows


def test_weights_of_a_kernel_have_one_format():
    gate, up = (GpuWeight(FORMATS[name], 8, 64) for name in ("q4_1", "q6_k"))
    with pytest.raises(ValueError, match="same format"):
        LinearOperator((gate, up), (False, False), activation="silu")


@pytest.mark.parametrize("name", ["q8f16_1", "q5_0"])
def test_weights_in_parts(gpu, name):
    n, k, fmt = 150, 100, FORMATS[name]
    ((weight, parts, matrix),) = weights(gpu, fmt, n, k, 1)
    limits = replace(gpu.limits, max_weight_bytes=64 * max(part[0].nbytes for part in parts))
    rows_of_parts = row_parts((weight,), limits)
    assert [len(rows) for rows in rows_of_parts] == [64, 64, 22]
    in_parts = [part[rows.start : rows.stop] for rows in rows_of_parts for part in parts]
    func = linear(LinearOperator((weight,), (True,), residual=True), limits)
    bias = gpu.rng.standard_normal(n).astype("float32")
    for rows in (1, 9):
        x = gpu.rng.standard_normal((rows, k)).astype("float32")
        residual = gpu.rng.standard_normal((rows, n)).astype("float32")
        *_, y = gpu.run(func, x, *in_parts, bias, residual, np.full((rows, n), 7, "float32"))
        assert relative_error(y, x @ matrix.T + bias + residual) < 1e-5, rows
    ids = np.array([0, 63, 64, n - 1, 128, 127, 64], "int32")
    *_, y = gpu.run(embedding(weight, 1.5, limits), ids, *in_parts, np.zeros((7, k), "float32"))
    assert relative_error(y, matrix[ids] * 1.5) < 1e-6


def test_gated_weights_in_parts(gpu):
    n, k, fmt = 100, 96, FORMATS["q0f16"]
    (gate, gate_parts, gate_matrix), (up, up_parts, up_matrix) = weights(gpu, fmt, n, k, 2)
    limits = replace(gpu.limits, max_weight_bytes=64 * 2 * k)
    pieces = [slice(rows.start, rows.stop) for rows in row_parts((gate, up), limits)]
    assert len(pieces) == 2
    gates = [part[piece] for piece in pieces for part in gate_parts]
    ups = [part[piece] for piece in pieces for part in up_parts]
    func = linear(LinearOperator((gate, up), (True, False), activation="silu"), limits)
    bias = gpu.rng.standard_normal(n).astype("float32")
    for rows in (1, 5):
        x = gpu.rng.standard_normal((rows, k)).astype("float32") * 0.1
        *_, y = gpu.run(func, x, *gates, bias, *ups, np.zeros((rows, n), "float32"))
        expected = silu(x @ gate_matrix.T + bias) * (x @ up_matrix.T)
        assert relative_error(y, expected) < 1e-5, rows


def test_weights_that_cannot_be_cut():
    limits = GpuLimits(256, 32 << 10, max_weight_bytes=8 << 20)
    weight = GpuWeight(FORMATS["q4f16_0"], 64_000, 512)
    with pytest.raises(CompileError, match="weight of 15 MB is stored K x N, which cannot be cut"):
        row_parts((weight,), limits)
    with pytest.raises(CompileError, match="64 rows of a weight take 16777216 bytes"):
        row_parts((GpuWeight(FORMATS["q0f32"], 65, 65_536),), limits)


def test_parts_are_even_and_within_the_limit():
    limits = GpuLimits(256, 32 << 10, max_weight_bytes=128 << 20)
    for fmt, n, k, expected in (
        (FORMATS["q8f16_1"], 151_936, 896, [75_968, 75_968]),
        (FORMATS["q8f16_1"], 149_796, 896, [149_796]),
        (FORMATS["q0f32"], 128_256, 2048, [16_064] * 7 + [15_808]),
    ):
        rows = row_parts((GpuWeight(fmt, n, k),), limits)
        assert [len(part) for part in rows] == expected
        assert [part.start for part in rows] == [0, *(part.stop for part in rows)][:-1]


def test_activations_of_large_numbers_are_finite(gpu):
    fmt = TensorFormat("float32")
    parts = [np.eye(8, dtype="float32"), np.eye(8, dtype="float32")]
    x = np.array([[-1e4, -200, -90, -1, 0, 90, 200, 1e4]], "float32")
    for activation in ("silu", "gelu_tanh"):
        weight = GpuWeight(fmt, 8, 8)
        operator = LinearOperator((weight, weight), (False, False), activation=activation)
        *_, y = gpu.run(linear(operator, gpu.limits), x, *parts, np.zeros((1, 8), "float32"))
        np.testing.assert_allclose(y[0, 4:], [0, 90**2, 200**2, 1e8], rtol=1e-6)
        np.testing.assert_allclose(y[0, :3], 0, atol=1e-6)


@pytest.mark.parametrize("fmt", CASES)
def test_embedding(gpu, fmt):
    n, k = SHAPES[0]
    ((table, parts, matrix),) = weights(gpu, fmt, n, k, 1)
    ids = np.array([0, n - 1, 5, 5, 17], "int32")
    func = embedding(table, 1.5, gpu.limits)
    *_, y = gpu.run(func, ids, *parts, np.zeros((len(ids), k), "float32"))
    assert relative_error(y, matrix[ids] * 1.5) < 1e-6
