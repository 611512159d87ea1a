"""Linear layers in dot products of bfloat16, against NumPy over the same rounded numbers."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from everycast.artifact.host import host_platform
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.cpu.linear import gated_mlp, linears
from everycast.schedules.cpu.linear_inputs import (
    activation_specs,
    activation_terms,
    num_terms,
)
from everycast.schedules.cpu.linear_operator import LinearOperator
from everycast.schedules.cpu.packing import PackedWeight
from everycast.schedules.cpu.tuning.measure import CpuLab, OperatorBench
from everycast.targets.cpu import _export
from everycast.targets.linker import find_linker

BFLOAT16 = TensorFormat("bfloat16")
Q4 = TensorFormat("float16", 4, 32, None)
SHAPES = [(1, 1), (16, 2), (5, 31), (16, 32), (17, 33), (40, 63), (23, 97), (48, 200)]
FEW = (1, 2, 3, 5)
ALL_TILES = (1, 2, 3, 5, 7, 8, 9, 15, 17, 33)
pytestmark = pytest.mark.parametrize("lab", ["avx512bf16"], indirect=True)
both_terms = pytest.mark.parametrize("terms", [1, 2])


def small(isa):
    """Few tokens a tile: less code to compile, the same arithmetic."""
    return replace(isa, num_registers=8)


def rounded(x, terms):
    """What `terms` of bfloat16 stand for, float64."""
    total = np.zeros(x.shape)
    for _ in range(terms):
        term = (x - total).astype(np.float32).astype(ml_dtypes.bfloat16)
        total += term.astype(np.float64)
    return total


def prepared(lab, weights, x, terms):
    buffers = [lab.tensor(np.full(*s)) for s in (
        (shape, 77, dtype) for shape, dtype in activation_specs(weights, len(x), terms)
    )]  # fmt: skip
    lab.build(activation_terms(weights, terms, "int16", "mlp", lab.isa))(lab.tensor(x), *buffers)
    return buffers


def empty(lab, m, n):
    return lab.tensor(np.full((m, n), np.nan, "float32"))


def assert_close(y, expected, tolerance=2e-6):
    assert np.abs(y.numpy() - expected).max() <= tolerance * np.abs(expected).max()


def check(lab, n, k, terms, isa, batches):
    weight = PackedWeight(BFLOAT16, n, k)
    packed, values = lab.random_weight(weight, lab.rng)
    bias = lab.rng.standard_normal(n).astype("float32")
    kernel = lab.build(linears([weight], [True], isa=isa, terms=terms, residual=True))
    for m in batches:
        x = lab.rng.standard_normal((m, k)).astype("float32")
        residual = lab.rng.standard_normal((m, n)).astype("float32")
        y = empty(lab, m, n)
        xs = prepared(lab, [weight], x, terms)
        kernel(*xs, packed, lab.tensor(bias), lab.tensor(residual), y)
        assert_close(y, rounded(x, terms) @ values.T.astype("float64") + bias + residual)


@both_terms
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_odd_shapes(lab, n, k, terms):
    check(lab, n, k, terms, small(lab.isa), FEW)


@both_terms
def test_every_tile(lab, terms):
    check(lab, 23, 97, terms, lab.isa, ALL_TILES)


@both_terms
def test_more_tokens_than_a_chunk(lab, terms):
    check(lab, 32, 8192, terms, small(lab.isa), (70, 133))


@both_terms
def test_sums_are_float32(lab, terms):
    """Whole numbers, the sums of which bfloat16 could not hold, come out exactly."""
    n, k, m = 24, 999, 3
    weight = PackedWeight(BFLOAT16, n, k)
    values = lab.rng.integers(-128, 129, (n, k)).astype("float32")
    packed = lab.pack(weight, {"weight": values.astype(ml_dtypes.bfloat16)})
    limit = 256 if terms == 1 else 1 << 12
    x = lab.rng.integers(-limit // 2, limit // 2, (m, k)).astype("float32")
    y = empty(lab, m, n)
    kernel = lab.build(linears([weight], [False], isa=small(lab.isa), terms=terms))
    kernel(*prepared(lab, [weight], x, terms), packed, y)
    expected = x.astype("int64") @ values.astype("int64").T
    assert np.abs(expected).max() > 1 << 13
    np.testing.assert_array_equal(y.numpy(), expected.astype("float32"))


@both_terms
def test_denormal_numbers_count_as_zero(lab, terms):
    weight = PackedWeight(BFLOAT16, 16, 2)
    values = np.full((16, 2), 2.0**-130, "float32")
    values[8:, 1] = 2.0**-100
    packed = lab.pack(weight, {"weight": values.astype(ml_dtypes.bfloat16)})
    x, y = np.full((1, 2), 2.0**20, "float32"), empty(lab, 1, 16)
    kernel = lab.build(linears([weight], [False], isa=small(lab.isa), terms=terms))
    kernel(*prepared(lab, [weight], x, terms), packed, y)
    np.testing.assert_array_equal(y.numpy(), np.repeat([0.0, 2.0**-80], 8).astype("float32")[None])


@both_terms
def test_several_weights(lab, terms):
    weights = [PackedWeight(BFLOAT16, n, 104) for n in (48, 17, 5)]
    pairs = [lab.random_weight(weight, lab.rng) for weight in weights]
    kernel = lab.build(linears(weights, [False] * 3, isa=small(lab.isa), terms=terms))
    for m in FEW:
        x = lab.rng.standard_normal((m, 104)).astype("float32")
        outputs = [empty(lab, m, weight.n) for weight in weights]
        packed = [packed for packed, _ in pairs]
        kernel(*prepared(lab, weights, x, terms), *packed, *outputs)
        for y, (_, values) in zip(outputs, pairs, strict=True):
            assert_close(y, rounded(x, terms) @ values.T.astype("float64"))


@both_terms
def test_gated_mlp(lab, terms):
    weights = [PackedWeight(BFLOAT16, 40, 95)] * 2
    (gate, gate_values), (up, up_values) = (lab.random_weight(w, lab.rng) for w in weights)
    kernel = lab.build(gated_mlp(*weights, "silu", [False, False], isa=small(lab.isa), terms=terms))
    for m in FEW:
        x = lab.rng.standard_normal((m, 95)).astype("float32")
        y = empty(lab, m, 40)
        kernel(*prepared(lab, weights, x, terms), gate, up, y)
        a, b = (rounded(x, terms) @ v.T.astype("float64") for v in (gate_values, up_values))
        assert_close(y, a / (1 + np.exp(-a)) * b, 1e-5)


@both_terms
@pytest.mark.parametrize("k", [97, 256])
def test_a_token_does_not_depend_on_its_batch(lab, k, terms):
    weight = PackedWeight(BFLOAT16, 23, k)
    packed, _ = lab.random_weight(weight, lab.rng)
    kernel = lab.build(linears([weight], [False], isa=lab.isa, terms=terms))
    x = lab.rng.standard_normal((33, k)).astype("float32")

    def bits(rows):
        y = empty(lab, len(rows), 23)
        kernel(*prepared(lab, [weight], rows, terms), packed, y)
        return y.numpy().view(np.int32)

    alone = np.concatenate([bits(x[i : i + 1]) for i in range(len(x))])
    for m in ALL_TILES:
        np.testing.assert_array_equal(bits(x[-m:]), alone[-m:])


@pytest.mark.parametrize(("terms", "least", "most"), [(1, 1e-3, 4e-3), (2, 1e-7, 8e-6)])
def test_what_rounding_activations_costs(lab, terms, least, most):
    weight = PackedWeight(BFLOAT16, 64, 512)
    packed, values = lab.random_weight(weight, lab.rng)
    x, y = lab.rng.standard_normal((4, 512)).astype("float32"), empty(lab, 4, 64)
    kernel = lab.build(linears([weight], [False], isa=small(lab.isa), terms=terms))
    kernel(*prepared(lab, [weight], x, terms), packed, y)
    expected = x.astype("float64") @ values.T.astype("float64")
    error = np.sqrt(np.mean((y.numpy() - expected) ** 2) / np.mean(expected**2))
    assert least < error < most


def test_when_activations_are_in_bfloat16(lab):
    bf16, other, q4 = (PackedWeight(fmt, 16, 64) for fmt in (BFLOAT16, TensorFormat("float16"), Q4))
    without = replace(lab.isa, has_bf16_dot=False)
    terms = {"int8": 1, "mixed": 1, "int16": 2, "float32": 0}
    for activations, count in terms.items():
        assert num_terms([bf16, bf16], lab.isa, activations) == count
        for weights in ([other], [bf16, other], [bf16, q4]):
            assert num_terms(weights, lab.isa, activations) == 0
        assert num_terms([bf16], without, activations) == 0
        assert (num_terms([q4], without, activations) > 0) == (count > 0)


@both_terms
def test_the_instruction_is_used(lab, terms):
    weight = PackedWeight(BFLOAT16, 16, 64)
    func = linears([weight], [False], isa=small(lab.isa), terms=terms)
    assembly = tvm.compile(func, target=lab.target).mod.inspect_source("asm")
    # It takes activations from memory, spread to all rows, and its sums stay in registers.
    dots = [line for line in assembly.splitlines() if "vdpbf16ps" in line]
    assert dots and all("{1to16}" in line for line in dots)
    assert "everycast_dot_bf16" not in assembly


@both_terms
def test_can_be_tuned(lab, terms):
    """A schedule changes no bit of the results, and random operands are ordinary numbers."""
    weight = PackedWeight(BFLOAT16, 20, 70)
    operator = LinearOperator(weights=(weight,), biases=(False,), terms=terms, residual=True)
    assert operator.name == f"linears-20x70.bfloat16-residual-bfloat16x{terms}"
    linker = find_linker(host_platform())
    tuning_lab = CpuLab(
        lab.target, small(lab.isa), lambda built, path: _export(built, path, linker)
    )
    bench = OperatorBench(tuning_lab, operator, 5)
    assert all(np.isfinite(y).all() for y in bench._expected)
    schedule = operator.default_schedule(tuning_lab.isa)
    other = schedule.with_parameters({"tile_tokens": 3, "prefetch_many": 4096, "chunk_bytes": 1})
    assert bench.is_right(bench.kernel(other))
