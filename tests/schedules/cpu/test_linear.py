"""Linear layers against NumPy: every format, every kind of activations, any number of tokens."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tvm
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.cpu.activation import activation_buffers, quantize_activations
from everycast.schedules.cpu.isa import isa_of
from everycast.schedules.cpu.linear import gated_mlp, linears
from everycast.schedules.cpu.linear_inputs import activation_starts, num_terms
from everycast.schedules.cpu.packing import PackedWeight
from tvm import relax, tirx

FLOATS = [TensorFormat("float32"), TensorFormat("float16"), TensorFormat("bfloat16")]
Q4 = TensorFormat("float16", 4, 32, None)
Q8 = TensorFormat("float16", 8, 32, 127)
Q6 = TensorFormat("float16", 6, 16, 32)
Q3 = TensorFormat("float16", 3, 40, 3)
SYMMETRIC = TensorFormat("float16", 4, 32, 7)
SYMMETRIC_16 = TensorFormat("float16", 4, 16, 8)
INTEGER_FORMATS = [
    Q4,
    Q8,
    Q6,
    SYMMETRIC,
    SYMMETRIC_16,
    TensorFormat("float32", 4, 64, None),
    TensorFormat("bfloat16", 5, 32, None, "KN"),
]
# Few tokens a tile: less code to compile, the same arithmetic.
SMALL_TILES = (1, 2, 3, 5)
ALL_TILES = (1, 2, 3, 5, 7, 8, 9, 15, 17, 33)
BATCHES = (1, 2, 5, 8, 17, 33, 131)


def small(isa):
    return replace(isa, num_registers=4 * 16 // isa.lanes)


KEPT_FROM = 2.0


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

    def random_x(self, m):
        """Some values are far larger than the others, so that some groups keep their low terms."""
        rng, shape = self.lab.rng, (m, self.weights[0].k)
        outliers = np.where(rng.random(shape) < 1 / 64, 30, 1)
        return (rng.standard_normal(shape) * outliers).astype("float32")

    def activations(self, x, terms, threshold=KEPT_FROM):
        """(kernel arguments for x, what they stand for)."""
        if not terms:
            return [self.lab.tensor(x)], x
        arguments, *_, stands_for = self.lab.quantized(x, terms, threshold, self.weights)
        return arguments, stands_for

    def outputs(self, m):
        nan = float("nan")
        return [self.lab.tensor(np.full((m, w.n), nan, "float32")) for w in self.weights]


def assert_close(y, expected, tolerance=1e-5):
    assert np.abs(y.numpy() - expected).max() <= tolerance * np.abs(expected).max()


def check(lab, weights, biases, *, terms, isa, tokens, residual=False):
    layers = Layers(lab, weights, biases)
    func = linears(weights, biases, isa=isa, terms=terms, residual=residual)
    kernel = lab.build(func)
    for m in tokens:
        x_arguments, x = layers.activations(layers.random_x(m), terms)
        added = lab.rng.standard_normal((m, weights[0].n)).astype("float32")
        outputs = layers.outputs(m)
        extra = [lab.tensor(added)] if residual else []
        kernel(*x_arguments, *layers.arguments(), *extra, *outputs)
        for y, expected in zip(outputs, layers.expected(x), strict=True):
            assert_close(y, expected + added if residual else expected)


@pytest.mark.parametrize("k", [104, 33])
@pytest.mark.parametrize("fmt", [*FLOATS, *INTEGER_FORMATS, Q3], ids=str)
def test_float_activations(lab, fmt, k):
    weight = PackedWeight(fmt, 40, k)
    check(lab, [weight], [True], terms=0, isa=small(lab.isa), tokens=SMALL_TILES)


@pytest.mark.parametrize("lab", ["avx2", "avx512", "word_pairs"], indirect=True)
@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("fmt", INTEGER_FORMATS, ids=str)
def test_integer_activations(lab, fmt, activations):
    weight = PackedWeight(fmt, 40, 104)
    terms = num_terms([weight], lab.isa, activations)
    assert terms == {"int8": 1, "int16": 2}[activations]
    tokens = (*SMALL_TILES, 16, 70)
    check(lab, [weight], [True], terms=terms, isa=small(lab.isa), tokens=tokens)


@pytest.mark.parametrize(
    "lab", ["avx2", "avx512bw", "avxvnni", "avx512", "word_pairs"], indirect=True
)
@pytest.mark.parametrize("terms", [1, 2])
def test_two_planes(lab, terms):
    """The same numbers as of the same weight in one piece, to the last bit."""
    for fmt, k in ((Q8, 104), (TensorFormat("float32", 8, 64, 128, "KN"), 136)):
        parts = lab.random_parts(fmt, 40, k, lab.rng)
        whole, planes = PackedWeight(fmt, 40, k), PackedWeight(fmt, 40, k, planes=True)
        layers = Layers(lab, [whole], [False])
        for m in (*SMALL_TILES, 17):
            x, _ = layers.activations(layers.random_x(m), terms)
            outputs = []
            for weight in (whole, planes):
                func = linears([weight], [False], isa=small(lab.isa), terms=terms)
                (y,) = layers.outputs(m)
                lab.build(func)(*x, lab.pack(weight, parts), y)
                outputs.append(y.numpy())
            np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("lab", ["avx2", "avx512"], indirect=True)
@pytest.mark.parametrize("fmt", [Q4, FLOATS[1]], ids=str)
def test_every_tail_of_a_tile(lab, fmt):
    weight = PackedWeight(fmt, 23, 136)
    check(lab, [weight], [False], terms=0, isa=lab.isa, tokens=ALL_TILES, residual=True)


@pytest.mark.parametrize("lab", ["avx2", "avx512", "word_pairs"], indirect=True)
@pytest.mark.parametrize("terms", [1, 2])
def test_every_tail_of_an_integer_tile(lab, terms):
    weight = PackedWeight(Q4, 23, 136)
    tokens = (*ALL_TILES, 64, 65, 130)
    check(lab, [weight], [True], terms=terms, isa=lab.isa, tokens=tokens, residual=True)


@pytest.mark.parametrize("lab", ["avx2"], indirect=True)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("fmt", [Q4, SYMMETRIC, SYMMETRIC_16], ids=str)
def test_unpacked_blocks(lab, fmt, terms):
    """Fewer groups than a vector has lanes, and more; many tokens and few."""
    isa = small(lab.isa)
    for k in (33, 648):
        weight = PackedWeight(fmt, 23, k)
        assert 3 < isa.unpack_tokens <= 13
        check(lab, [weight], [True], terms=terms, isa=isa, tokens=(3, 13, 18))


@pytest.mark.parametrize("lab", ["avx2"], indirect=True)
def test_blocks_too_large_to_unpack(lab):
    weight = PackedWeight(SYMMETRIC, 16, 24000)
    check(lab, [weight], [False], terms=1, isa=small(lab.isa), tokens=(13,))


@pytest.mark.parametrize("lab", ["avx2"], indirect=True)
def test_avx2_three_bits(lab):
    check(lab, [PackedWeight(Q3, 33, 88)], [False], terms=0, isa=lab.isa, tokens=(1, 7))


@pytest.mark.parametrize(
    ("formats", "terms"),
    [((Q4, Q8, Q6), 1), ((Q4, Q8, Q6), 2), ((FLOATS[0], Q3, FLOATS[2]), 0)],
)
def test_several_weights_of_different_formats(lab, formats, terms):
    weights = [PackedWeight(fmt, n, 96) for fmt, n in zip(formats, (48, 17, 5), strict=True)]
    biases = [True, False, True]
    check(lab, weights, biases, terms=terms, isa=small(lab.isa), tokens=SMALL_TILES)


@pytest.mark.parametrize("terms", [1, 2])
def test_more_tokens_than_a_chunk(lab, terms):
    weight = PackedWeight(Q4, 48, 4096)
    check(lab, [weight], [False], terms=terms, isa=small(lab.isa), tokens=(128, 131, 300))


@pytest.mark.parametrize(("terms", "least", "most"), [(1, 1e-3, 1e-2), (2, 1e-7, 2e-4)])
@pytest.mark.parametrize("fmt", INTEGER_FORMATS, ids=str)
def test_what_rounding_activations_costs(lab, fmt, terms, least, most):
    """Relative error against float activations; zero would mean that nothing was rounded."""
    weight = PackedWeight(fmt, 64, 512)
    layers = Layers(lab, [weight], [False])
    kernel = lab.build(linears([weight], [False], isa=small(lab.isa), terms=terms))
    x = lab.rng.standard_normal((4, weight.k)).astype("float32")
    x_arguments, _ = layers.activations(x, terms, threshold=0.0)
    outputs = layers.outputs(4)
    kernel(*x_arguments, *layers.arguments(), *outputs)
    expected = layers.expected(x)[0]
    error = np.sqrt(np.mean((outputs[0].numpy() - expected) ** 2) / np.mean(expected**2))
    assert least < error < most


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("terms", [0, 1, 2])
def test_gated_mlp(lab, activation, terms):
    weights, biases = [PackedWeight(Q4, 40, 96), PackedWeight(Q8, 40, 96)], [False, True]
    layers = Layers(lab, weights, biases)
    func = gated_mlp(*weights, activation, biases, isa=small(lab.isa), terms=terms)
    kernel = lab.build(func)
    for m in SMALL_TILES:
        x_arguments, x = layers.activations(layers.random_x(m), terms)
        y = layers.outputs(m)[0]
        kernel(*x_arguments, *layers.arguments(), y)
        gate, up = layers.expected(x)
        inner = gate if activation == "silu" else 1.5957691216 * (gate + 0.044715 * gate**3)
        assert_close(y, gate / (1 + np.exp(np.minimum(-inner, 700))) * up)


def assert_batch_does_not_matter(layers, kernel, terms, num_outputs, extra=(), threshold=KEPT_FROM):
    """Each token of each batch against the token alone, to the last bit.

    `extra` are more arguments of a row a token, such as a residual.
    """

    def run(first, m):
        x_arguments, _ = layers.activations(x[first : first + m], terms, threshold)
        rows = [layers.lab.tensor(array[first : first + m]) for array in extra]
        outputs = layers.outputs(m)[:num_outputs]
        kernel(*x_arguments, *layers.arguments(), *rows, *outputs)
        return [y.numpy().view(np.int32) for y in outputs]

    x = layers.random_x(max(BATCHES))
    alone = [np.concatenate(rows) for rows in zip(*(run(i, 1) for i in range(len(x))), strict=True)]
    for m in BATCHES:
        first = len(x) - m
        for together, expected in zip(run(first, m), alone, strict=True):
            np.testing.assert_array_equal(together, expected[first:])


BATCH_CASES = [
    *(("avx2", terms, fmt) for terms in (1, 2) for fmt in (Q4, Q8)),
    *(("avxvnni", terms, Q4) for terms in (1, 2)),
    *(("avx512bw", terms, fmt) for terms in (1, 2) for fmt in (Q4, SYMMETRIC)),
    *(("avx512", terms, fmt) for terms in (1, 2) for fmt in (SYMMETRIC, SYMMETRIC_16)),
    *(("avx512", terms, fmt) for terms in (1, 2) for fmt in (Q4, Q8, Q6, INTEGER_FORMATS[-1])),
    *(("word_pairs", terms, fmt) for terms in (1, 2) for fmt in (Q4, SYMMETRIC, Q8)),
    *((target, 0, fmt) for target in ("avx512", "avx2") for fmt in (*FLOATS, Q4, Q8, Q6, Q3)),
]


@pytest.mark.parametrize(("lab", "terms", "fmt"), BATCH_CASES, indirect=["lab"], ids=str)
def test_a_token_does_not_depend_on_its_batch(lab, terms, fmt):
    layers = Layers(lab, [PackedWeight(fmt, 39, 200)], [True])
    func = linears(layers.weights, [True], isa=lab.isa, terms=terms, residual=True)
    residual = lab.rng.standard_normal((max(BATCHES), 39)).astype("float32")
    assert_batch_does_not_matter(layers, lab.build(func), terms, 1, [residual])


@pytest.mark.parametrize("threshold", [0.0, 2.0, 20.0])
@pytest.mark.parametrize("lab", ["avx2", "avx512", "word_pairs"], indirect=True)
def test_kept_groups_of_other_tokens_do_not_matter(lab, threshold):
    """All groups, a sixth of them, and hardly any; two words of flags."""
    layers = Layers(lab, [PackedWeight(Q4, 23, 2200)], [False])
    kernel = lab.build(linears(layers.weights, [False], isa=lab.isa, terms=2))
    assert_batch_does_not_matter(layers, kernel, 2, 1, threshold=threshold)


@pytest.mark.parametrize("terms", [0, 1, 2])
def test_a_token_of_several_weights_does_not_depend_on_its_batch(lab, terms):
    weights = [PackedWeight(fmt, n, 136) for fmt, n in ((Q4, 32), (Q8, 16), (Q6, 16))]
    layers = Layers(lab, weights, [False] * 3)
    kernel = lab.build(linears(weights, [False] * 3, isa=lab.isa, terms=terms))
    assert_batch_does_not_matter(layers, kernel, terms, 3)


@pytest.mark.parametrize(
    ("lab", "terms", "activation", "formats"),
    [
        ("avx512", 0, "silu", (Q4, Q8)),
        ("avx512", 1, "gelu_tanh", (Q4, Q8)),
        ("avx512", 1, "silu", (Q4, SYMMETRIC)),
        ("avx512", 1, "silu", (SYMMETRIC, SYMMETRIC)),
        ("avx512", 2, "silu", (Q4, Q4)),
        ("word_pairs", 1, "gelu_tanh", (SYMMETRIC, SYMMETRIC)),
        ("word_pairs", 2, "silu", (Q4, Q4)),
        ("word_pairs", 2, "silu", (Q4, SYMMETRIC)),
        ("avx2", 0, "gelu_tanh", (Q4, Q8)),
    ],
    indirect=["lab"],
    ids=str,
)
def test_a_gated_token_does_not_depend_on_its_batch(lab, terms, activation, formats):
    layers = Layers(lab, [PackedWeight(fmt, 40, 136) for fmt in formats], [False, True])
    func = gated_mlp(*layers.weights, activation, [False, True], isa=lab.isa, terms=terms)
    assert_batch_does_not_matter(layers, lab.build(func), terms, 1)


def test_num_terms(lab):
    q4, q6, q3, floats = (PackedWeight(fmt, 16, 80) for fmt in (Q4, Q6, Q3, FLOATS[0]))
    without = replace(lab.isa, byte_dot=None)
    terms = {"int8": 1, "mixed": 2, "int16": 2, "float32": 0}
    for activations, expected in terms.items():
        assert num_terms([q4, q6], lab.isa, activations) == expected
        assert num_terms([q4, q3], lab.isa, activations) == 0
        assert num_terms([floats], lab.isa, activations) == 0
        assert num_terms([q4], without, activations) == 0


def test_equal_calls_share_a_function(lab):
    def make(n, terms=1, residual=False):
        weights = [PackedWeight(Q4, n, 64)]
        return linears(weights, [False], isa=lab.isa, terms=terms, residual=residual)

    assert make(16) is make(16)
    cases = itertools.product((16, 32), (0, 1, 2), (False, True))
    assert len({make(*case).attrs["global_symbol"] for case in cases}) == 12


def test_residual_is_for_one_weight(lab):
    weights = [PackedWeight(Q4, 16, 64)] * 2
    with pytest.raises(ValueError, match="residual"):
        linears(weights, [False, False], isa=lab.isa, terms=1, residual=True)


@pytest.mark.parametrize("fmt", [Q4, FLOATS[0], FLOATS[1], FLOATS[2]], ids=str)
def test_compiles_for_aarch64(fmt):
    target = tvm.target.Target(
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76", "mattr": ["+neon"]}
    )
    weight = PackedWeight(fmt, 40, 104)
    func = linears([weight], [True], isa=small(isa_of(target)), terms=0)
    assert "fmla" in tvm.compile(func, target=target).mod.inspect_source("asm")


@pytest.mark.parametrize("terms", [1, 2])
def test_in_a_relax_function_with_any_number_of_tokens(lab, terms):
    """Called by `call_tir`, with the activation buffers allocated by the same function."""
    weight = PackedWeight(Q4, 40, 104)
    builder, m = relax.BlockBuilder(), tirx.Var("m", "int64")
    x = relax.Var("x", relax.TensorType([m, weight.k], "float32"))
    packed = relax.Var("packed", relax.TensorType([weight.num_bytes], "uint8"))
    func = linears([weight], [False], isa=small(lab.isa), terms=terms)
    starts = activation_starts([weight], lab.isa)
    rounding = quantize_activations(weight.k, terms, KEPT_FROM, starts=starts)
    with builder.function("main", [x, packed]):
        quantize = builder.add_func(rounding, "quantize")
        linear = builder.add_func(func, "linear")
        buffers = [relax.TensorType(*spec) for spec in activation_buffers(weight.k, m, terms)]
        xq = builder.emit(relax.call_tir(quantize, [x], buffers))
        arguments = [relax.TupleGetItem(xq, i) for i in range(len(buffers))]
        y_type = relax.TensorType([m, weight.n], "float32")
        y = builder.emit(relax.call_tir(linear, [*arguments, packed], y_type))
        builder.emit_func_output(y)
    vm = relax.VirtualMachine(tvm.compile(builder.get(), target=lab.target), tvm.cpu())
    layers = Layers(lab, [weight], [False])
    for tokens in (1, 6):
        x_value = layers.random_x(tokens)
        _, stands_for = layers.activations(x_value, terms)
        y_value = vm["main"](lab.tensor(x_value), *layers.arguments())
        assert_close(y_value, layers.expected(stands_for)[0])
