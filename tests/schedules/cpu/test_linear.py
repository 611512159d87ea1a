"""Linear layers against NumPy: every format, both kinds of activations, any number of tokens."""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.cpu.activation import activation_buffers, quantize_activations
from everycast.schedules.cpu.isa import isa_of
from everycast.schedules.cpu.linear import gated_mlp, linears, uses_int8
from everycast.schedules.cpu.packing import PackedWeight
from tvm import relax, tirx

FLOATS = [TensorFormat("float32"), TensorFormat("float16"), TensorFormat("bfloat16")]
Q4 = TensorFormat("float16", 4, 32, None)
Q8 = TensorFormat("float16", 8, 32, 127)
Q6 = TensorFormat("float16", 6, 16, 32)
Q3 = TensorFormat("float16", 3, 40, 3)
INT8_FORMATS = [
    Q4,
    Q8,
    Q6,
    TensorFormat("float16", 4, 32, 7),
    TensorFormat("float32", 4, 64, None),
    TensorFormat("bfloat16", 5, 32, None, "KN"),
]
# Few tokens a tile: less code to compile, the same arithmetic.
SMALL_TILES = (1, 2, 3, 5)
ALL_TILES = (1, 2, 3, 5, 7, 8, 9, 15, 17, 33)


def small(isa):
    return replace(isa, num_registers=4 * 16 // isa.lanes)


class Layers:
    """Random weights and biases, and what they should do to x."""

    def __init__(self, lab, weights, biases):
        self.lab, self.weights = lab, weights
        self.pairs = [lab.random_weight(weight, lab.rng) for weight in weights]
        self.biases = [
            lab.rng.standard_normal(weight.n).astype("float32") if has_bias else None
            for weight, has_bias in zip(weights, biases, strict=True)
        ]

    def arguments(self):
        result = []
        for (packed, _), bias in zip(self.pairs, self.biases, strict=True):
            result += [packed] if bias is None else [packed, self.lab.tensor(bias)]
        return result

    def expected(self, x):
        return [
            x.astype("float64") @ values.T + (0 if bias is None else bias)
            for (_, values), bias in zip(self.pairs, self.biases, strict=True)
        ]

    def activations(self, m, int8):
        """(x, kernel arguments for x, what they stand for)."""
        x = self.lab.rng.standard_normal((m, self.weights[0].k)).astype("float32")
        return (x, *self.lab.quantized(x)) if int8 else (x, [self.lab.tensor(x)], x)

    def outputs(self, m):
        nan = float("nan")
        return [self.lab.tensor(np.full((m, w.n), nan, "float32")) for w in self.weights]


def assert_close(y, expected, tolerance=1e-5):
    assert np.abs(y.numpy() - expected).max() <= tolerance * np.abs(expected).max()


def check(lab, weights, biases, *, int8, isa, tokens, residual=False):
    layers = Layers(lab, weights, biases)
    func = linears(weights, biases, isa=isa, int8=int8, residual=residual)
    kernel = lab.build(func)
    for m in tokens:
        _, x_arguments, x = layers.activations(m, int8)
        added = lab.rng.standard_normal((m, weights[0].n)).astype("float32")
        outputs = layers.outputs(m)
        extra = [lab.tensor(added)] if residual else []
        kernel(*x_arguments, *layers.arguments(), *extra, *outputs)
        for y, expected in zip(outputs, layers.expected(x), strict=True):
            assert_close(y, expected + added if residual else expected)


@pytest.mark.parametrize("fmt", [*FLOATS, *INT8_FORMATS, Q3], ids=str)
def test_float_activations(lab, fmt):
    weight = PackedWeight(fmt, 40, 104)
    check(lab, [weight], [True], int8=False, isa=small(lab.isa), tokens=SMALL_TILES)


@pytest.mark.parametrize("fmt", INT8_FORMATS, ids=str)
def test_int8_activations(lab, fmt):
    weight = PackedWeight(fmt, 40, 104)
    assert uses_int8([weight], lab.isa, "int8")
    check(lab, [weight], [True], int8=True, isa=small(lab.isa), tokens=SMALL_TILES)


@pytest.mark.parametrize("lab", ["avx2", "avx512"], indirect=True)
@pytest.mark.parametrize("fmt", [Q4, FLOATS[1]], ids=str)
def test_every_tail_of_a_tile(lab, fmt):
    weight = PackedWeight(fmt, 23, 136)
    check(lab, [weight], [False], int8=False, isa=lab.isa, tokens=ALL_TILES, residual=True)


def test_every_tail_of_an_int8_tile(lab):
    weight = PackedWeight(Q4, 23, 136)
    check(lab, [weight], [True], int8=True, isa=lab.isa, tokens=ALL_TILES, residual=True)


@pytest.mark.parametrize("lab", ["avx2"], indirect=True)
def test_avx2_three_bits(lab):
    check(lab, [PackedWeight(Q3, 33, 88)], [False], int8=False, isa=lab.isa, tokens=(1, 7))


@pytest.mark.parametrize(
    ("formats", "int8"), [((Q4, Q8, Q6), True), ((FLOATS[0], Q3, FLOATS[2]), False)]
)
def test_several_weights_of_different_formats(lab, formats, int8):
    weights = [PackedWeight(fmt, n, 96) for fmt, n in zip(formats, (48, 17, 5), strict=True)]
    biases = [True, False, True]
    check(lab, weights, biases, int8=int8, isa=small(lab.isa), tokens=SMALL_TILES)


def test_more_tokens_than_a_chunk(lab):
    weight = PackedWeight(Q4, 48, 4096)
    check(lab, [weight], [False], int8=True, isa=small(lab.isa), tokens=(128, 131, 300))


def test_int8_activations_cost_little(lab):
    weight = PackedWeight(Q4, 64, 512)
    layers = Layers(lab, [weight], [False])
    kernel = lab.build(linears([weight], [False], isa=small(lab.isa), int8=True))
    x, x_arguments, _ = layers.activations(4, int8=True)
    outputs = layers.outputs(4)
    kernel(*x_arguments, *layers.arguments(), *outputs)
    expected = layers.expected(x)[0]
    error = np.sqrt(np.mean((outputs[0].numpy() - expected) ** 2) / np.mean(expected**2))
    assert 1e-4 < error < 1e-2


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("int8", [True, False])
def test_gated_mlp(lab, activation, int8):
    weights, biases = [PackedWeight(Q4, 40, 96), PackedWeight(Q8, 40, 96)], [False, True]
    layers = Layers(lab, weights, biases)
    func = gated_mlp(*weights, activation, biases, isa=small(lab.isa), int8=int8)
    kernel = lab.build(func)
    for m in SMALL_TILES:
        _, x_arguments, x = layers.activations(m, int8)
        y = layers.outputs(m)[0]
        kernel(*x_arguments, *layers.arguments(), y)
        gate, up = layers.expected(x)
        inner = gate if activation == "silu" else 1.5957691216 * (gate + 0.044715 * gate**3)
        assert_close(y, gate / (1 + np.exp(np.minimum(-inner, 700))) * up)


def test_which_calls_use_int8(lab):
    q4, q3, floats = (PackedWeight(fmt, 16, 80) for fmt in (Q4, Q3, FLOATS[0]))
    assert uses_int8([q4, q4], lab.isa, "int8")
    assert not uses_int8([q4], lab.isa, "float32")
    assert not uses_int8([q4, q3], lab.isa, "int8")
    assert not uses_int8([floats], lab.isa, "int8")
    assert not uses_int8([q4], replace(lab.isa, has_vnni512=False), "int8")


def test_equal_calls_share_a_function(lab):
    def make(n, residual=False):
        weights = [PackedWeight(Q4, n, 64)]
        return linears(weights, [False], isa=lab.isa, int8=True, residual=residual)

    assert make(16) is make(16)
    names = {make(n, r).attrs["global_symbol"] for n in (16, 32) for r in (False, True)}
    assert len(names) == 4


def test_residual_is_for_one_weight(lab):
    weights = [PackedWeight(Q4, 16, 64)] * 2
    with pytest.raises(ValueError, match="residual"):
        linears(weights, [False, False], isa=lab.isa, int8=True, residual=True)


@pytest.mark.parametrize("fmt", [Q4, FLOATS[0], FLOATS[1], FLOATS[2]], ids=str)
def test_compiles_for_aarch64(fmt):
    target = tvm.target.Target(
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76", "mattr": ["+neon"]}
    )
    weight = PackedWeight(fmt, 40, 104)
    func = linears([weight], [True], isa=small(isa_of(target)), int8=False)
    assert "fmla" in tvm.compile(func, target=target).mod.inspect_source("asm")


def test_in_a_relax_function_with_any_number_of_tokens(lab):
    """Called by `call_tir`, with the activation buffers allocated by the same function."""
    weight = PackedWeight(Q4, 40, 104)
    builder, m = relax.BlockBuilder(), tirx.Var("m", "int64")
    x = relax.Var("x", relax.TensorType([m, weight.k], "float32"))
    packed = relax.Var("packed", relax.TensorType([weight.num_bytes], "uint8"))
    with builder.function("main", [x, packed]):
        quantize = builder.add_func(quantize_activations(weight.k), "quantize")
        linear = builder.add_func(
            linears([weight], [False], isa=small(lab.isa), int8=True), "linear"
        )
        buffers = [relax.TensorType(*spec) for spec in activation_buffers(weight.k, m)]
        xq = builder.emit(relax.call_tir(quantize, [x], buffers))
        arguments = [relax.TupleGetItem(xq, i) for i in range(3)]
        y_type = relax.TensorType([m, weight.n], "float32")
        y = builder.emit(relax.call_tir(linear, [*arguments, packed], y_type))
        builder.emit_func_output(y)
    vm = relax.VirtualMachine(tvm.compile(builder.get(), target=lab.target), tvm.cpu())
    layers = Layers(lab, [weight], [False])
    for tokens in (1, 6):
        x_value, _, approximate = layers.activations(tokens, int8=True)
        y_value = vm["main"](lab.tensor(x_value), *layers.arguments())
        assert_close(y_value, layers.expected(approximate)[0])
