"""The plain PrimFunc of every operator, compiled, against NumPy."""

import itertools
import json

import numpy as np
import pytest
import tvm
from everycast.artifact.dtypes import numpy_dtype
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.bits import pack_values
from everycast.quant_schemes.group import dequantize
from everycast.relax_models import operators as ops
from everycast.relax_models.config import DecoderConfig
from everycast.relax_models.layers import Embedding, Linear, RMSNorm
from everycast.relax_models.rope import RopeConfig
from everycast.relax_models.weight_expr import element
from tvm import relax, te, tirx
from tvm.relax.frontend import nn

FLOATS = [TensorFormat(dtype) for dtype in ("float32", "float16", "bfloat16")]
QUANTIZED = [
    TensorFormat("float16", bits, {3: 40, 6: 16}.get(bits, 32), zero_point, layout)
    for bits, zero_point, layout in itertools.product((3, 4, 5, 6, 8), (3, None), ("NK", "KN"))
]
OTHER_SCALES = [
    TensorFormat("float32", 4, 32, 7),
    TensorFormat("float32", 4, 32, None),
    TensorFormat("bfloat16", 5, 64, None),
]
Q4 = TensorFormat("float16", 4, 32, 7)
Q6 = TensorFormat("float16", 6, 16, None)


def tensor(array):
    return tvm.runtime.tensor(np.ascontiguousarray(array))


def compile_func(func):
    return tvm.compile(func.with_attr("global_symbol", "main"), target="llvm")["main"]


def random_parts(fmt, n, k, rng):
    if fmt.bits is None:
        return {"weight": rng.standard_normal((n, k)).astype(numpy_dtype(fmt.dtype))}
    parts = pack_values(rng.integers(0, 1 << fmt.bits, (n, k), dtype=np.uint8), fmt)
    for part, (shape, dtype) in fmt.parts(n, k).items():
        if part not in parts:
            parts[part] = rng.standard_normal(shape).astype(numpy_dtype(dtype))
    return {part: parts[part] for part in fmt.parts(n, k)}


@pytest.mark.parametrize("fmt", [*FLOATS, *QUANTIZED, *OTHER_SCALES], ids=str)
def test_element_is_what_dequantize_says(fmt):
    n, k = 5, 88  # the last group is not whole
    parts = random_parts(fmt, n, k, np.random.default_rng(1))
    inputs = [te.placeholder(s, d, name=part) for part, (s, d) in fmt.parts(n, k).items()]
    output = te.compute((n, k), lambda i, j: element(fmt, inputs, i, j), name="values")
    values = tensor(np.full((n, k), np.nan, "float32"))
    compile_func(te.create_prim_func([*inputs, output]))(*map(tensor, parts.values()), values)
    expected = dequantize(parts, fmt, n, k)
    if fmt.dtype == "float32" and fmt.is_affine:  # the product is rounded, or not, before the sum
        np.testing.assert_allclose(values.numpy(), expected, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(values.numpy(), expected)


class Operator:
    """One operator emitted as a model emits it: its description, and its PrimFunc compiled.

    `inputs` are example arrays, their first axis symbolic; `layers` add their parameters.
    """

    def __init__(self, emit, inputs, layers=()):
        self.inputs = inputs
        m = {}
        variables = [
            relax.Var(f"x{i}", relax.TensorType(self._symbolic(x.shape, m), x.dtype.name))
            for i, x in enumerate(inputs)
        ]
        parameters = [p for layer in layers for _, p in layer.named_parameters()]
        builder = relax.BlockBuilder()
        with builder.function("main", [*variables, *(p._expr for p in parameters)]):
            result = emit(*(nn.Tensor(_expr=variable) for variable in variables))
            results = result if isinstance(result, tuple) else (result,)
            builder.emit_func_output(relax.Tuple([r._expr for r in results]))
        funcs = [f for f in builder.get().functions.values() if isinstance(f, tirx.PrimFunc)]
        (self.func,) = funcs
        self.op = json.loads(str(self.func.attrs[ops.ATTRIBUTE]))

    @staticmethod
    def _symbolic(shape, sizes):
        first = sizes.setdefault(shape[0], tirx.Var(f"m{shape[0]}", "int64"))
        return [first, *shape[1:]]

    def run(self, arguments, *output_shapes):
        """Outputs of the compiled PrimFunc for `arguments` in call order."""
        outputs = [tensor(np.full(shape, np.nan, "float32")) for shape in output_shapes]
        call = [tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
        compile_func(self.func)(*call, *outputs)
        return [y.numpy() for y in outputs]


class Layer:
    """A layer with random parts; `weight` is what they stand for."""

    def __init__(self, layer, fmt, rng):
        layer.set_format(fmt)
        self.layer = layer
        parts = random_parts(fmt, layer.n, layer.k, rng)
        self.arguments = list(parts.values())
        self.weight = dequantize(parts, fmt, layer.n, layer.k).astype("float64")
        self.bias = np.zeros(layer.n, "float32")
        if layer.bias is not None:
            self.bias = rng.standard_normal(layer.n).astype("float32")
            self.arguments.append(self.bias)

    def __call__(self, x):
        return x @ self.weight.T + self.bias


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def floats(rng, *shape):
    return rng.standard_normal(shape).astype("float32")


def assert_close(y, expected):
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("fmt", [FLOATS[1], Q4], ids=str)
def test_embedding(rng, fmt):
    table = Layer(Embedding(11, 40), fmt, rng)
    ids = np.array([3, 0, 10, 3], "int32")
    operator = Operator(lambda i: ops.embedding(i, table.layer, 1.5), [ids], [table.layer])
    assert (operator.op["kind"], operator.op["scale"]) == ("embedding", 1.5)
    assert operator.op["weight"]["bits"] == fmt.bits
    (y,) = operator.run([ids, *table.arguments], (4, 40))
    assert_close(y, 1.5 * table.weight[ids])


def test_linears(rng):
    specs = [(Linear(40, 7), Q4), (Linear(40, 3, bias=True), Q6), (Linear(40, 5), FLOATS[2])]
    layers = [Layer(layer, fmt, rng) for layer, fmt in specs]
    x = floats(rng, 3, 40)
    operator = Operator(
        lambda x: ops.linears(x, *(layer.layer for layer in layers), role="mlp"),
        [x],
        [s[0] for s in specs],
    )
    assert operator.op["kind"] == "linears"
    assert operator.op["biases"] == [False, True, False]
    assert [(w["n"], w["k"], w["bits"], w["zero_point"]) for w in operator.op["weights"]] == [
        (7, 40, 4, 7), (3, 40, 6, None), (5, 40, None, None),
    ]  # fmt: skip
    arguments = [x, *(a for layer in layers for a in layer.arguments)]
    outputs = operator.run(arguments, (3, 7), (3, 3), (3, 5))
    for y, layer in zip(outputs, layers, strict=True):
        assert_close(y, layer(x))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_add(rng, bias):
    layer = Layer(Linear(40, 7, bias=bias), Q4, rng)
    x, residual = floats(rng, 3, 40), floats(rng, 3, 7)
    operator = Operator(
        lambda x, r: ops.linear_add(x, layer.layer, r, role="mlp"), [x, residual], [layer.layer]
    )
    assert (operator.op["kind"], operator.op["bias"]) == ("linear_add", bias)
    (y,) = operator.run([x, *layer.arguments, residual], (3, 7))
    assert_close(y, residual + layer(x))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
def test_gated_mlp(rng, activation, biases):
    gate, up = (
        Layer(Linear(40, 7, bias=bias), fmt, rng)
        for bias, fmt in zip(biases, (Q4, FLOATS[0]), strict=True)
    )
    x = floats(rng, 3, 40)
    operator = Operator(
        lambda x: ops.gated_mlp(x, gate.layer, up.layer, activation), [x], [gate.layer, up.layer]
    )
    assert (operator.op["kind"], operator.op["activation"]) == ("gated_mlp", activation)
    assert operator.op["biases"] == list(biases)
    (y,) = operator.run([x, *gate.arguments, *up.arguments], (3, 7))
    g = gate(x)
    if activation == "silu":
        g = g / (1 + np.exp(-g))
    else:
        g = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    assert_close(y, g * up(x))


@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(rng, with_residual):
    norm, x, weight = RMSNorm(24, 0.25), floats(rng, 3, 24), floats(rng, 24)
    residual = [floats(rng, 3, 24)] if with_residual else []
    operator = Operator(
        lambda x, *r: ops.rms_norm(x, norm, residual=r[0] if r else None), [x, *residual], [norm]
    )
    constants = {"size": 24, "epsilon": 0.25, "residual": with_residual}
    assert operator.op == {"kind": "rms_norm", **constants}
    (y,) = operator.run([x, weight, *residual], (3, 24))
    expected = x / np.sqrt((x.astype("float64") ** 2).mean(1, keepdims=True) + 0.25) * weight
    assert_close(y, expected + residual[0] if with_residual else expected)


def test_rotary_table():
    positions = np.array([0, 1, 5, 4000], "int32")
    inv_freq = np.array([1.0, 0.1, 0.01], "float32")
    frequencies = nn.Parameter((3,), "float32")
    module = nn.Module()
    module.inv_freq = frequencies
    operator = Operator(lambda p: ops.rotary_table(p, frequencies, 1.25), [positions], [module])
    assert operator.op == {"kind": "rotary_table", "half": 3, "scale": 1.25}
    (y,) = operator.run([positions, inv_freq], (4, 6))
    angle = (positions[:, None].astype("float32") * inv_freq).astype("float64")
    np.testing.assert_allclose(
        y, 1.25 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1), atol=1e-5
    )


def test_take_rows(rng):
    x, rows = floats(rng, 5, 6), np.array([4, 0, 4], "int32")
    operator = Operator(ops.take_rows, [x, rows])
    assert operator.op == {"kind": "take_rows"}
    (y,) = operator.run([x, rows], (3, 6))
    np.testing.assert_array_equal(y, x[rows])


HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 4, 16
CONFIG = DecoderConfig(
    model_type="llama", vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, rms_norm_eps=1e-5,
    max_position_embeddings=64, attention_scale=0.4, ropes=(RopeConfig(HEAD_DIM),),
    layer_ropes=(0, 0), layer_windows=(None, None),
)  # fmt: skip
LAYER = 1


def test_rotate_and_append(rng):
    q, k, v = (floats(rng, 3, heads * HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    table = floats(rng, 3, HEAD_DIM)
    slots = np.array([17, 0, 47], "int32")
    pages = np.full((2, 3, 2 * KV_HEADS, PAGE * HEAD_DIM), 9, "float16")
    operator = Operator(
        lambda *inputs: ops.rotate_and_append(*inputs, config=CONFIG, layer=LAYER),
        [q, k, v, table, slots, pages],
    )
    assert operator.op == {
        "kind": "rotate_and_append", "num_heads": HEADS, "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "rotary_dim": HEAD_DIM, "page_size": PAGE, "kv_dtype": "float16",
    }  # fmt: skip
    cos, sin = (half[:, None] for half in np.split(table, 2, axis=1))

    def rotated(x):
        low, high = np.split(x.reshape(3, -1, HEAD_DIM), 2, axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)

    expected = pages.copy()
    values = v.reshape(3, KV_HEADS, HEAD_DIM)
    for i, slot in enumerate(slots):
        page, token = expected[LAYER, slot // PAGE], slot % PAGE
        page[:KV_HEADS].reshape(KV_HEADS, HEAD_DIM, PAGE)[:, :, token] = rotated(k)[i]
        page[KV_HEADS:].reshape(KV_HEADS, PAGE, HEAD_DIM)[:, token] = values[i]
    written = tensor(pages)
    (y,) = operator.run([q, k, v, table, slots, written, LAYER], q.shape)
    np.testing.assert_allclose(y, rotated(q).reshape(q.shape), atol=1e-6)
    np.testing.assert_allclose(written.numpy(), expected, atol=4e-3)


@pytest.mark.parametrize("window", [None, 3])
def test_attention(rng, window):
    """Two sequences: one of 18 tokens of which 2 are new, one of 3 new tokens."""
    positions = np.array([16, 17, 0, 1, 2], "int32")
    sequences = [0, 0, 1, 1, 1]
    tables = np.array([[2, 0], [1, 1]], "int32")
    tiles = np.array([[0, 0, 2], [1, 2, 2], [1, 4, 1]], "int32")
    pages = floats(rng, 2, 3, 2 * KV_HEADS, PAGE * HEAD_DIM)
    q = floats(rng, 5, HEADS * HEAD_DIM)
    operator = Operator(
        lambda *inputs: ops.attention(*inputs, config=CONFIG, layer=LAYER, window=window),
        [q, pages, tables, positions, tiles],
    )
    assert (operator.op["kind"], operator.op["window"]) == ("attention", window)
    assert operator.op["scale"] == CONFIG.attention_scale
    keys = pages[LAYER, :, :KV_HEADS].reshape(3, KV_HEADS, HEAD_DIM, PAGE).transpose(1, 0, 3, 2)
    values = pages[LAYER, :, KV_HEADS:].reshape(3, KV_HEADS, PAGE, HEAD_DIM).transpose(1, 0, 2, 3)
    expected = np.zeros((5, HEADS, HEAD_DIM))
    for i, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(HEADS):
            seen_keys, seen_values = (
                x[h * KV_HEADS // HEADS, tables[sequence]].reshape(-1, HEAD_DIM)[
                    first : position + 1
                ]
                for x in (keys, values)
            )
            weights = np.exp(seen_keys @ q[i, h * HEAD_DIM :][:HEAD_DIM] * CONFIG.attention_scale)
            expected[i, h] = weights / weights.sum() @ seen_values
    (y,) = operator.run([q, pages, tables, positions, tiles, LAYER], q.shape)
    np.testing.assert_allclose(y, expected.reshape(q.shape), rtol=1e-4, atol=1e-5)
