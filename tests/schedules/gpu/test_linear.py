import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.group import dequantize
from everycast.quant_schemes.scheme import SCHEMES
from everycast.schedules.gpu.embedding import embedding
from everycast.schedules.gpu.linear import linear
from everycast.schedules.gpu.linear_operator import LinearOperator
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
