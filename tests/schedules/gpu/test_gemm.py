"""Linear layers as CUDA and Metal get them: matrix instructions for many rows, wide reads for few.
Emulated."""

import dataclasses

import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.group import dequantize
from everycast.schedules.gpu.half_rows import half_rows, padded
from everycast.schedules.gpu.limits import GpuLimits, MatrixTile
from everycast.schedules.gpu.linear import linear
from everycast.schedules.gpu.linear_operator import LinearOperator
from everycast.schedules.gpu.matrix_gemm import can_use_matrices, workspace_size
from everycast.schedules.gpu.weight import GpuWeight
from everycast.schedules.gpu.wide_gemv import has_wide_reads

SMALL = GpuLimits(
    max_threads=1024, shared_bytes=48 << 10, gemv_tokens=2, gemv_passes=1, gemv_words=4,
    gemv_stages=3, gemv_blocks=2, subgroup=32,
    matrix_tiles=(MatrixTile(16, 64, 64, 16, 16), MatrixTile(64, 64, 32, 32, 32)), matrix_blocks=3,
)  # fmt: skip
LARGE = dataclasses.replace(
    SMALL,
    gemv_stages=0,
    matrix_tiles=(
        MatrixTile(32, 64, 64, 16, 32), MatrixTile(64, 128, 32, 32, 32),
        MatrixTile(128, 128, 32, 64, 32),
    ),
    matrix_blocks=2,
)  # fmt: skip
METAL = GpuLimits(
    max_threads=256, shared_bytes=32 << 10, gemv_tokens=2, gemv_passes=1, gemv_words=4,
    gemv_blocks=2, subgroup=32, matrix_blocks=3, matrix_unit="simdgroup",
    matrix_tiles=(MatrixTile(16, 64, 32, 16, 32), MatrixTile(64, 64, 32, 32, 32)),
)  # fmt: skip
FORMATS = {
    "q4": TensorFormat("float16", 4, 32, 7),
    "q4 transposed": TensorFormat("float16", 4, 32, 7, "KN"),
    "q4 affine": TensorFormat("float16", 4, 32),
    "q8": TensorFormat("float16", 8, 32, 127),
    "q5": TensorFormat("float16", 5, 32),
    "Q4_K": TensorFormat("float32", 4, 32),
    "Q6_K": TensorFormat("float32", 6, 16, 32),
    "float16": TensorFormat("float16"),
    "bfloat16": TensorFormat("bfloat16"),
}
IN_FLOAT32 = {"float32": TensorFormat("float32"), "q3": TensorFormat("float16", 3, 40, 3)}
N, K = 77, 136
"""Neither fills a tile."""
LONG_N, LONG_K = 10, 4424
"""More of K than shared memory holds of x at a time."""
ROWS = (1, 2, 3, 16, 17, 65)
"""On both sides of where one kernel hands over to the next."""
HALF, SINGLE = 2e-3, 1e-5
"""Errors, as parts of the largest of a row: both factors rounded to 11 bits, or float32."""


def operator(fmt, n=N, k=K):
    return LinearOperator((GpuWeight(fmt, n, k),), (True,), residual=True)


def gated(fmt, n, k=K, activation="silu"):
    weight = GpuWeight(fmt, n, k)
    return LinearOperator((weight, weight), (False, True), activation=activation)


OPERATORS = {
    **{name: operator(fmt) for name, fmt in (FORMATS | IN_FLOAT32).items()},
    "long": operator(FORMATS["q4"], LONG_N, LONG_K),
    "float16 in two words": operator(FORMATS["float16"], LONG_N, 140),
    "gated": gated(FORMATS["q4"], 75),
    "gated, long": gated(FORMATS["q4"], LONG_N, 520),
    "gated q8": gated(FORMATS["q8"], 76, activation="gelu_tanh"),
}
OPERATORS_IN_LARGE_TILES = {
    "large": operator(FORMATS["q4"], 134),
    "large, long": operator(FORMATS["q8"], LONG_N, LONG_K),
    "large gated": gated(FORMATS["q4 affine"], 70),
}
OPERATORS_ON_METAL = {
    f"{name} on Metal": OPERATORS[name]
    for name in ("q4 transposed", "q4 affine", "q8", "Q6_K", "float16", "gated, long")
}
ALL = OPERATORS | OPERATORS_IN_LARGE_TILES | OPERATORS_ON_METAL


@pytest.fixture(scope="module")
def emulated(cuda_emulator, metal_emulator):
    """Operator → (its program, limits); the same function has the same name in each program."""
    programs = {}
    for emulator, limits, operators in (
        (cuda_emulator, SMALL, OPERATORS),
        (cuda_emulator, LARGE, OPERATORS_IN_LARGE_TILES),
        (metal_emulator, METAL, OPERATORS_ON_METAL),
    ):
        functions = [linear(op, limits) for op in operators.values()]
        functions += [half_rows(k, limits) for k in (K, 520, LONG_K)]
        program = emulator.Emulated(functions)
        programs |= dict.fromkeys(operators, (program, limits))
    yield programs
    for program in {id(program): program for program, _ in programs.values()}.values():
        program.close()


@pytest.fixture
def layer(emulated, random_parts):
    """`layer(name, x)` → (what the kernels make of x, what NumPy does)."""
    rng = np.random.default_rng(0)

    def run(name, x):
        program, limits = emulated[name]
        op = ALL[name]
        n, k, rows = op.n, op.k, len(x)
        arguments, products = [x], []
        if can_use_matrices(op, limits):
            halves = np.full((rows, padded(k)), 7, "float16"), np.full(rows, 7, "float32")
            _, *halves = program.run(f"half_rows_{k}", x, *halves)
            arguments += halves
        for weight, has_bias in zip(op.weights, op.biases, strict=True):
            parts = random_parts(weight.format, n, k, rng)
            arguments += [parts[part] for part in weight.format.parts(n, k)]
            product = x.astype(float) @ dequantize(parts, weight.format, n, k).astype(float).T
            if has_bias:
                arguments.append(rng.standard_normal(n).astype("float32"))
                product += arguments[-1]
            products.append(product)
        expected = products[0]
        if op.activation:
            expected = activation(products[0], op.activation) * products[1]
        if op.residual:
            arguments.append(rng.standard_normal((rows, n)).astype("float32"))
            expected = expected + arguments[-1]
        arguments.append(np.full((rows, n), 7, "float32"))
        at = len(arguments) - 1
        if size := workspace_size(op, limits):
            arguments.append(np.full(size, np.nan, "float32"))
        return program.run(op.name, *arguments)[at], expected

    return run


def activation(x, name):
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def errors(y, expected):
    """Of each row, relative to its largest."""
    return np.abs(y - expected).max(1) / np.abs(expected).max(1)


@pytest.mark.parametrize("name", ALL)
def test_linear_layers(layer, name):
    rng = np.random.default_rng(1)
    op = ALL[name]
    rows_of = (1, 2, 17) if op.k == LONG_K else ROWS
    if name in OPERATORS_IN_LARGE_TILES:
        rows_of = (3, 33, 65, 130)
    for rows in rows_of:
        x = rng.standard_normal((rows, op.k)).astype("float32")
        if op.activation:
            x *= 0.05
        y, expected = layer(name, x)
        in_halves = rows > SMALL.gemv_rows and can_use_matrices(op, SMALL)
        of_rows = errors(y, expected)
        if op.activation:  # a product of two sums, in some rows all of them small
            of_rows = np.abs(y - expected) / np.abs(expected).max() / 2
        assert of_rows.max() < (HALF if in_halves else SINGLE), rows


@pytest.mark.parametrize("name", ["q4", "float16", "q8 on Metal"])
def test_rows_of_any_size_keep_their_accuracy(layer, name):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((20, K)).astype("float32")
    # Far beyond what halves hold, at both ends; and one large value among small ones.
    x *= (10.0 ** np.linspace(-20, 20, 20))[:, None].astype("float32")
    x[3, 5] = 1e9 * np.abs(x[3]).max()
    y, expected = layer(name, x)
    large = np.abs(expected).max(1) > 100  # elsewhere bias and residual are all
    assert large.sum() >= 8
    assert errors(y[large], expected[large]).max() < HALF
    assert errors(y[~large], expected[~large]).max() < 1e-2


@pytest.mark.parametrize("name", ["q4", "q8 on Metal"])
def test_zeros_and_numbers_that_are_not_finite_stay_in_their_rows(layer, name):
    x = np.random.default_rng(3).standard_normal((20, K)).astype("float32")
    x[4], x[5, 3], x[6, 0] = 0, np.inf, np.nan
    with np.errstate(invalid="ignore"):
        y, expected = layer(name, x)
    assert not np.isfinite(y[5:7]).any()
    rest = [i for i in range(20) if i not in (5, 6)]
    assert errors(y[rest], expected[rest]).max() < HALF


@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        ("q4", ("mma.sync.aligned.m16n8k16", "ldmatrix.sync", "cp.async.cg")),
        ("q8 on Metal", ("simdgroup_multiply_accumulate", "simdgroup_load", "simdgroup_store")),
    ],
)
def test_matrix_instructions_multiply(emulated, name, instructions):
    source = emulated[name][0].source
    for instruction in instructions:
        assert instruction in source


def test_what_is_meant_to_be_exact_is_multiplied_in_float32():
    for name, fmt in (FORMATS | IN_FLOAT32).items():
        assert can_use_matrices(operator(fmt), SMALL) == (name in FORMATS)
    without = dataclasses.replace(SMALL, matrix_tiles=())
    assert not can_use_matrices(operator(FORMATS["q4"]), without)
    assert not can_use_matrices(operator(FORMATS["float16"], k=137), SMALL)


def test_which_weights_are_read_by_several_words():
    for name, fmt in (FORMATS | IN_FLOAT32).items():
        is_wide = has_wide_reads(GpuWeight(fmt, N, K), SMALL)
        assert is_wide == (name not in ("q4 transposed", "float32")), name
    half = FORMATS["float16"]
    assert [has_wide_reads(GpuWeight(half, N, k), SMALL) for k in (137, 138, 140)] == [0, 0, 1]
    assert not has_wide_reads(GpuWeight(half, N, K, halves_in_words=True), SMALL)


@pytest.mark.parametrize(
    "tile", [(16, 64, 64, 16, 24), (24, 64, 64, 16, 16), (16, 64, 48, 16, 16), (16, 64, 64, 16, 8)]
)
def test_tiles_that_warps_do_not_fill_are_refused(tile):
    with pytest.raises(ValueError, match="parts do not fill"):
        MatrixTile(*tile)
