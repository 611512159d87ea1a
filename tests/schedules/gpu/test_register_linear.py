"""Linear layers in registers, and 16-bit weights that come as words."""

from dataclasses import replace

import numpy as np
import pytest
from everycast.artifact.dtypes import numpy_dtype
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.group import dequantize
from everycast.quant_schemes.scheme import SCHEMES
from everycast.schedules.gpu.embedding import embedding
from everycast.schedules.gpu.limits import GpuLimits
from everycast.schedules.gpu.linear import linear
from everycast.schedules.gpu.linear_operator import LinearOperator
from everycast.schedules.gpu.row_parts import row_parts
from everycast.schedules.gpu.weight import HALVES, GpuWeight, words_of

FORMATS = {
    **{name: scheme.linear for name, scheme in SCHEMES.items()},
    "q5_1": TensorFormat("float16", 5, 32),
    "q6_k": TensorFormat("float32", 6, 16, 32),
    "bfloat16": TensorFormat("bfloat16"),
}
UNIQUE = {fmt: name for name, fmt in reversed(FORMATS.items())}
CASES = [pytest.param(fmt, id=name) for fmt, name in UNIQUE.items()]


def in_registers(limits: GpuLimits) -> GpuLimits:
    return replace(limits, shares_memory=False)


def as_words(array: np.ndarray) -> np.ndarray:
    """A 16-bit tensor of an even number of values as a kernel gets it."""
    if array.dtype not in [numpy_dtype(name) for name in HALVES]:
        return array
    return np.ravel(array).view("uint32")


def weight(gpu, fmt, n, k, in_words):
    parts = gpu.random_parts(fmt, n, k, gpu.rng)
    ordered = [np.ascontiguousarray(parts[name]) for name in fmt.parts(n, k)]
    if in_words:
        ordered = [as_words(part) for part in ordered]
    return GpuWeight(fmt, n, k, in_words), ordered, dequantize(parts, fmt, n, k).astype(float)


def relative_error(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("in_words", [False, True])
@pytest.mark.parametrize("fmt", CASES)
def test_linear(gpu, fmt, in_words):
    n, k = 38, 100
    made, parts, matrix = weight(gpu, fmt, n, k, in_words)
    func = linear(LinearOperator((made,), (True,), residual=True), in_registers(gpu.limits))
    bias = gpu.rng.standard_normal(n).astype("float32")
    for rows in (1, 2, 11):
        x = gpu.rng.standard_normal((rows, k)).astype("float32")
        residual = gpu.rng.standard_normal((rows, n)).astype("float32")
        *_, y = gpu.run(func, x, *parts, bias, residual, np.full((rows, n), 7, "float32"))
        assert relative_error(y, x @ matrix.T + bias + residual) < 1e-5


@pytest.mark.parametrize("in_words", [False, True])
def test_weights_in_parts(gpu, in_words):
    n, k, fmt = 131, 100, FORMATS["q8f16_1"]
    made, parts, matrix = weight(gpu, fmt, n, k, False)
    made = replace(made, halves_in_words=in_words)
    limits = replace(gpu.limits, max_weight_bytes=64 * 128)
    rows_of_parts = row_parts((made,), limits)
    assert [len(rows) for rows in rows_of_parts] == [64, 64, 3]
    pieces = [part[rows.start : rows.stop] for rows in rows_of_parts for part in parts]
    if in_words:
        pieces = [as_words(piece) for piece in pieces]
    func = linear(LinearOperator((made,), (True,)), in_registers(limits))
    bias = gpu.rng.standard_normal(n).astype("float32")
    for rows in (1, 9):
        x = gpu.rng.standard_normal((rows, k)).astype("float32")
        *_, y = gpu.run(func, x, *pieces, bias, np.full((rows, n), 7, "float32"))
        assert relative_error(y, x @ matrix.T + bias) < 1e-5


def test_gated(gpu):
    n, k, fmt = 38, 100, FORMATS["q4f16_1"]
    gate, gate_parts, gate_matrix = weight(gpu, fmt, n, k, True)
    up, up_parts, up_matrix = weight(gpu, fmt, n, k, True)
    operator = LinearOperator((gate, up), (False, False), activation="silu")
    func = linear(operator, in_registers(gpu.limits))
    for rows in (1, 9):
        x = gpu.rng.standard_normal((rows, k)).astype("float32") * 0.1
        *_, y = gpu.run(func, x, *gate_parts, *up_parts, np.zeros((rows, n), "float32"))
        gated = x @ gate_matrix.T
        assert relative_error(y, gated / (1 + np.exp(-gated)) * (x @ up_matrix.T)) < 1e-5


@pytest.mark.parametrize("dtype", HALVES)
def test_every_finite_half_is_exact(gpu, dtype):
    """Subnormal ones as well, as an embedding of them."""
    bits = np.arange(1 << 16, dtype="uint16").view(numpy_dtype(dtype)).reshape(256, 256)
    with np.errstate(invalid="ignore"):
        expected = bits.astype("float32")
    # Float32 has no subnormal numbers on many devices: those of bfloat16 are.
    expected = np.where(np.isfinite(expected) & (np.abs(expected) >= 2.0**-126), expected, 0)
    table = GpuWeight(TensorFormat(dtype), 256, 256, True)
    func = embedding(table, 1.0, gpu.limits)
    ids = np.arange(256, dtype="int32")
    words = np.ascontiguousarray(bits).view("uint32").ravel()
    assert words.shape == words_of(bits.shape)
    *_, y = gpu.run(func, ids, words, np.zeros((256, 256), "float32"))
    is_counted = expected != 0
    np.testing.assert_array_equal(y[is_counted], expected[is_counted])
