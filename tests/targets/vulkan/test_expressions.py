"""Expressions of every type, on a device, against NumPy."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32")
LANES = 16
FEW = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

_BINARY = {
    "add": (lambda a, b: a + b, np.add),
    "sub": (lambda a, b: a - b, np.subtract),
    "mul": (lambda a, b: a * b, np.multiply),
    "min": (tirx.min, np.minimum),
    "max": (tirx.max, np.maximum),
}
_INTEGER_BINARY = {
    "and": (lambda a, b: a & b, np.bitwise_and),
    "or": (lambda a, b: a | b, np.bitwise_or),
    "xor": (lambda a, b: a ^ b, np.bitwise_xor),
    "div": (tirx.truncdiv, lambda a, b: _truncated(a, b)[0]),
    "mod": (tirx.truncmod, lambda a, b: _truncated(a, b)[1]),
    "floordiv": (tirx.floordiv, lambda a, b: a // _not_zero(b)),
    "floormod": (tirx.floormod, lambda a, b: a % _not_zero(b)),
}
_COMPARE = {
    "lt": (lambda a, b: a < b, np.less),
    "le": (lambda a, b: a <= b, np.less_equal),
    "gt": (lambda a, b: a > b, np.greater),
    "eq": (lambda a, b: tirx.EQ(a, b), np.equal),
    "ne": (lambda a, b: tirx.NE(a, b), np.not_equal),
}


def _not_zero(values: np.ndarray) -> np.ndarray:
    """What divisors are made of, here and in `_tir`: positive, so that nothing overflows."""
    low = np.array(7, values.dtype)
    return (values & low) | np.array(1, values.dtype)


def _truncated(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    divisor = _not_zero(b)
    quotient = a // divisor
    quotient = quotient + ((quotient < 0) & (quotient * divisor != a)).astype(a.dtype)
    return quotient, a - quotient * divisor


def trees(dtype: str) -> st.SearchStrategy[Any]:
    """Expressions over the arrays 0 and 1 and constants, as nested tuples."""
    names = [*_BINARY, *(_INTEGER_BINARY if dtype in INTEGERS else ())]
    constants = st.integers(0, 100).map(lambda n: ("const", n))
    leaves = st.sampled_from([("array", 0), ("array", 1)]) | constants
    return st.recursive(
        leaves,
        lambda inner: (
            st.tuples(st.sampled_from(names), inner, inner)
            | st.tuples(st.just("select"), st.sampled_from([*_COMPARE]), inner, inner, inner, inner)
        ),
        max_leaves=8,
    )


def _tir(tree: Any, arrays: list[Any], dtype: str, lanes: int) -> Any:
    vector = dtype if lanes == 1 else f"{dtype}x{lanes}"
    kind, *parts = tree
    if kind == "array":
        return arrays[parts[0]]
    if kind == "const":
        value = tirx.const(parts[0], dtype)
        return value if lanes == 1 else T.Broadcast(value, lanes)
    if kind == "select":
        a, b, c, d = (_tir(part, arrays, dtype, lanes) for part in parts[1:])
        return tirx.Select(_COMPARE[parts[0]][0](a, b), c, d)
    a, b = (_tir(part, arrays, dtype, lanes) for part in parts)
    if kind in ("div", "mod", "floordiv", "floormod"):
        seven, one = (_tir(("const", n), arrays, dtype, lanes) for n in (7, 1))
        b = (b & seven) | one
    result = (_BINARY | _INTEGER_BINARY)[kind][0](a, b)
    assert str(result.ty.dtype) == vector
    return result


def _numpy(tree: Any, arrays: list[np.ndarray]) -> np.ndarray:
    kind, *parts = tree
    if kind == "array":
        return arrays[parts[0]]
    if kind == "const":
        return np.full_like(arrays[0], parts[0])
    if kind == "select":
        a, b, c, d = (_numpy(part, arrays) for part in parts[1:])
        return np.where(_COMPARE[parts[0]][1](a, b), c, d)
    a, b = (_numpy(part, arrays) for part in parts)
    return (_BINARY | _INTEGER_BINARY)[kind][1](a, b).astype(arrays[0].dtype)


def values(dtype: str, size: int, seed: int = 0) -> np.ndarray:
    """All of an integer type's range, or floats of small size."""
    random = np.random.default_rng(seed)
    if dtype in INTEGERS:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return random.integers(low, high, size, dtype=dtype, endpoint=True)
    return random.uniform(-4, 4, size).astype(dtype)


@pytest.mark.parametrize("lanes", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
@FEW
@given(data=st.data())
def test_expressions_give_what_numpy_gives(run, kernel, dtype: str, lanes: int, data: Any) -> None:
    forest = data.draw(st.lists(trees(dtype), min_size=6, max_size=6))
    size = LANES * lanes

    def body(buffers, _, indices):
        start = indices[0] * lanes
        at = [start] if lanes == 1 else [T.Ramp(start, 1, lanes)]
        arrays = [b.vload(at) for b in buffers[:2]]
        for tree, out in zip(forest, buffers[2:], strict=True):
            B.buffer_store(out, _tir(tree, arrays, dtype, lanes), at)

    func = kernel("f", [((size,), dtype)] * 8, body, sizes=[("threadIdx.x", LANES)])
    a, b = values(dtype, size), values(dtype, size, 1)
    outputs = [np.zeros(size, dtype) for _ in forest]
    run(func, a, b, *outputs)
    for tree, got in zip(forest, outputs, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = _numpy(tree, [a, b])
        if dtype in INTEGERS:
            np.testing.assert_array_equal(got, expected, str(tree))
        else:
            _check_floats(got, expected, tree)


def _check_floats(got: np.ndarray, expected: np.ndarray, tree: Any) -> None:
    # Rounding may turn a comparison: a few lanes may differ, the rest not.
    finite = np.isfinite(expected.astype(np.float64)) & (abs(expected.astype(np.float64)) < 1e4)
    scale = np.maximum(1, abs(expected.astype(np.float64)))
    error = abs(got.astype(np.float64) - expected.astype(np.float64)) / scale
    tolerance = 0.05 if got.dtype == np.float16 else 1e-4
    wrong = finite & ~(error < tolerance)
    assert wrong.sum() <= len(got) // 8, (tree, got, expected)


@pytest.mark.parametrize("source", [*INTEGERS, *FLOATS, "bool"])
def test_casts_to_every_type(run, kernel, source: str) -> None:
    targets = [*INTEGERS, *FLOATS, "bool"]
    if source in FLOATS:
        given_values = np.array([0, 1, 2.5, 100, 17, 3, 99.75, 120], source)
    elif source == "bool":
        given_values = np.array([0, 1, 1, 0, 1, 0, 0, 1], bool)
    else:
        given_values = values(source, 8)
        if source in ("int64", "uint64", "int32", "uint32"):
            given_values //= np.array(1 << 10, source)  # float16 holds no more

    def body(buffers, _, indices):
        for out, dtype in zip(buffers[1:], targets, strict=True):
            B.buffer_store(out, T.Cast(dtype, buffers[0][indices[0]]), [indices[0]])

    buffers = [((8,), source), *(((8,), dtype) for dtype in targets)]
    func = kernel("casts", buffers, body, sizes=[("threadIdx.x", 8)])
    outputs = [np.zeros(8, dtype) for dtype in targets]
    run(func, given_values, *outputs)
    for got, dtype in zip(outputs, targets, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = given_values.astype(dtype)
        is_finite = np.isfinite(expected.astype(np.float64))
        np.testing.assert_allclose(
            got[is_finite].astype(np.float64), expected[is_finite].astype(np.float64), rtol=1e-3,
            err_msg=f"{source} to {dtype}",
        )  # fmt: skip


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_floats(run, kernel, dtype: str, lanes: int) -> None:
    x = np.linspace(0.05, 0.95, 20).astype(dtype)
    functions = {
        "exp": np.exp, "exp2": np.exp2, "exp10": lambda v: 10**v, "log": np.log, "log2": np.log2,
        "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda v: 1 / np.sqrt(v),
        "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos,
        "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "atanh": np.arctanh,
        "asinh": np.arcsinh, "erf": np.vectorize(math.erf),
        "sigmoid": lambda v: 1 / (1 + np.exp(-v)), "abs": abs, "floor": np.floor, "ceil": np.ceil,
        "trunc": np.trunc, "round": np.round, "nearbyint": np.rint,
    }  # fmt: skip

    def body(buffers, _, indices):
        first = indices[0] * lanes
        for n, name in enumerate(functions):
            places = [start if lanes == 1 else T.Ramp(start, 1, lanes)
                      for start in (first, first + n * 20)]  # fmt: skip
            argument = buffers[0].vload([places[0]])
            if name in ("floor", "ceil", "trunc", "round", "nearbyint"):
                minus_three = tirx.const(-3, dtype)
                argument *= minus_three if lanes == 1 else T.Broadcast(minus_three, lanes)
            B.buffer_store(buffers[1], getattr(tirx, name)(argument), [places[1]])

    shapes = [((20,), dtype), ((20 * len(functions),), dtype)]
    func = kernel("functions", shapes, body, sizes=[("threadIdx.x", 20 // lanes)])
    out = np.zeros(20 * len(functions), dtype)
    run(func, x, out)
    for n, (name, function) in enumerate(functions.items()):
        argument = x.astype(np.float64)
        if name in ("floor", "ceil", "trunc", "round", "nearbyint"):
            argument = (x * np.array(-3, dtype)).astype(np.float64)
        loose = dtype == "float16" or name in ("asin", "acos")  # Vulkan promises no more
        np.testing.assert_allclose(
            out[n * 20 : n * 20 + 20].astype(np.float64), function(argument),
            rtol=4e-3 if loose else 2e-4, atol=1e-3 if loose else 2e-6,
            err_msg=name,
        )  # fmt: skip


def test_functions_of_two_and_three_floats(run, kernel) -> None:
    x = np.linspace(0.1, 3, 16).astype(np.float32)
    y = np.linspace(2.9, 0.37, 16).astype(np.float32)

    def body(buffers, _, indices):
        i = indices[0]
        a, b, zero = buffers[0][i], buffers[1][i], buffers[3][i]
        results = [
            tirx.pow(a, b), tirx.atan2(a, b), tirx.fmod(a, b), tirx.copysign(a, -b),
            T.Cast("float32", tirx.isnan(zero / zero)),
            T.Cast("float32", tirx.isinf(a / zero)),
        ]  # fmt: skip
        for n, result in enumerate(results):
            B.buffer_store(buffers[2], result, [n * 16 + i])

    shapes = [((16,), "float32")] * 2 + [((96,), "float32"), ((16,), "float32")]
    out = np.zeros(96, np.float32)
    func = kernel("two", shapes, body, sizes=[("threadIdx.x", 16)])
    run(func, x, y, out, np.zeros(16, np.float32))
    one = np.ones_like(x)
    expected = np.concatenate([x**y, np.arctan2(x, y), np.fmod(x, y), -x, one, one])
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=1e-5)


def test_constants_are_exact(run, kernel) -> None:
    numbers = {
        "int32": [-(2**31), 2**31 - 1, -1],
        "int64": [-(2**63), 2**63 - 1, -(2**40)],
        "uint32": [2**32 - 1, 0, 7],
        "uint64": [2**64 - 1, 2**63, 7],
        "int8": [-128, 127, -1],
        "float32": [1e-30, -3.4e38, 0.1],
        "float16": [65504.0, -0.1, 6e-5],
    }

    def body(buffers, _, __):
        for buffer, constants in zip(buffers, numbers.values(), strict=True):
            for i, number in enumerate(constants):
                dtype = str(buffer.dtype)
                value = (
                    T.Cast(dtype, tirx.const(number >> 1, "uint64")) * tirx.const(2, dtype)
                    + tirx.const(number & 1, dtype)
                    if dtype == "uint64"
                    else tirx.const(number, dtype)
                )
                B.buffer_store(buffer, value, [i])
        B.buffer_store(buffers[5], T.float32(float("inf")), [2])

    func = kernel("constants", [((3,), dtype) for dtype in numbers], body)
    outputs = [np.zeros(3, dtype) for dtype in numbers]
    run(func, *outputs)
    for got, (dtype, constants) in zip(outputs, numbers.items(), strict=True):
        expected = np.array(constants, dtype)
        if dtype == "float32":
            expected[2] = np.inf
        np.testing.assert_array_equal(got, expected)


def test_bits_are_read_as_another_type(run, kernel) -> None:
    words = values("uint32", 8)
    shapes = [((8,), "uint32"), ((8,), "float32"), ((32,), "int8"), ((16,), "float16"),
              ((8,), "uint32"), ((8,), "uint32")]  # fmt: skip

    def body(buffers, _, indices):
        i = indices[0]
        word = buffers[0][i]
        B.buffer_store(buffers[1], T.reinterpret("float32", word), [i])
        bytes_ = B.Bind(T.reinterpret("int8x4", word))
        B.buffer_store(buffers[2], bytes_, [T.Ramp(i * 4, 1, 4)])
        halves = B.Bind(T.reinterpret("float16x2", word))
        B.buffer_store(buffers[3], halves, [T.Ramp(i * 2, 1, 2)])
        B.buffer_store(buffers[4], T.reinterpret("uint32", bytes_), [i])
        B.buffer_store(buffers[5], T.reinterpret("uint32", halves), [i])

    outputs = [np.zeros(shape, dtype) for shape, dtype in shapes[1:]]
    run(kernel("bits", shapes, body, sizes=[("threadIdx.x", 8)]), words, *outputs)
    for got in (outputs[1], outputs[3], outputs[4]):
        np.testing.assert_array_equal(got.view(np.uint32), words)
    is_number = np.isfinite(words.view(np.float32))
    np.testing.assert_array_equal(outputs[0].view(np.uint32)[is_number], words[is_number])
    is_number = np.isfinite(words.view(np.float16))
    np.testing.assert_array_equal(outputs[2][is_number], words.view(np.float16)[is_number])


def test_dot_products_of_bytes(run, kernel) -> None:
    a, b = values("int8", 32), values("int8", 32, 1)

    def body(buffers, _, indices):
        i = indices[0]
        x, y = (buffer.vload([T.Ramp(i * 4, 1, 4)]) for buffer in buffers[:2])
        B.buffer_store(buffers[2], T.dp4a(x, y, T.int32(5)), [i])

    out = np.zeros(8, np.int32)
    func = kernel(
        "dots", [((32,), "int8"), ((32,), "int8"), ((8,), "int32")], body,
        sizes=[("threadIdx.x", 8)],
    )  # fmt: skip
    run(func, a, b, out)
    expected = (a.astype(np.int32) * b).reshape(8, 4).sum(1) + 5
    np.testing.assert_array_equal(out, expected)
