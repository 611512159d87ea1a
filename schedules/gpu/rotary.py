"""RoPE: the table of cosines and sines, and rotation together with the append to the KV pages."""

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from .kernel import (
    bind,
    body,
    either,
    elements,
    floor_div,
    floor_mod,
    kernel,
    kernel_factory,
    store,
)  # fmt: skip
from .limits import GpuLimits

_TURN = 2.0**32
"""Angles are fixed point, this many to a full turn, so that uint32 arithmetic wraps around with
them: the sine instructions of GPUs are only good near zero, and differ."""


@kernel_factory
def rotary_table(half: int, scale: float, limits: GpuLimits) -> tirx.PrimFunc:
    """(positions [m] int32, inv_freq [half]) → [m, 2 · half]: cosines, then sines, times scale.

    As exact as float32 products of position and frequency are. A thread for each angle.
    """
    with kernel(f"rotary_table_{half}") as (k, ib):
        positions = k.buffer("positions", ("num_tokens",), "int32")
        inv_freq = k.buffer("inv_freq", (half,), "float32")
        table = k.buffer("table", ("num_tokens", 2 * half), "float32")
        threads = min(limits.max_threads, 256)
        with body(), elements(k.size("num_tokens") * half, threads) as at:
            token, i = bind(floor_div(at, half)), bind(floor_mod(at, half))
            per_position = T.Cast("uint32", inv_freq[i] * T.float32(_TURN / (2 * math.pi)))
            angle = bind(T.Cast("uint32", positions[token]) * per_position)
            cos, sin = _cos_sin(angle)
            store(table, cos * T.float32(scale), token, i)
            store(table, sin * T.float32(scale), token, half + i)
    return ib.get()


def _cos_sin(angle: Any) -> tuple[Any, Any]:
    """Cosine and sine of a fixed-point angle, to about 1e-7.

    Of the angle's distance to the nearest quarter turn, by the polynomials of Cephes' sinf and
    cosf (S. Moshier, for |x| at most pi / 4); then put into the right quadrant.
    """
    quadrant = bind(T.shift_right(angle + T.uint32(1 << 29), T.uint32(30)))
    rest = angle - T.shift_left(quadrant, T.uint32(30))
    x = bind(T.Cast("float32", T.Cast("int32", rest)) * T.float32(2 * math.pi / _TURN))
    z = bind(x * x)
    sin = bind(x + x * z * _polynomial(z, -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
    cos = bind(
        T.float32(1) - T.float32(0.5) * z
        + z * z * _polynomial(z, 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
    )  # fmt: skip
    is_odd = bind(T.bitwise_and(quadrant, T.uint32(1)) == T.uint32(1))
    sine, cosine = bind(T.Select(is_odd, cos, sin)), bind(T.Select(is_odd, sin, cos))
    sine_is_negative = T.bitwise_and(quadrant, T.uint32(2)) == T.uint32(2)
    cosine_is_negative = T.bitwise_and(quadrant + T.uint32(1), T.uint32(2)) == T.uint32(2)
    return (
        T.Select(cosine_is_negative, -cosine, cosine),
        T.Select(sine_is_negative, -sine, sine),
    )


def _polynomial(x: Any, *coefficients: float) -> Any:
    value = T.float32(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + T.float32(coefficient)
    return value


@kernel_factory
def rotate_and_append(
    *, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, page_size: int,
    kv_dtype: str, limits: GpuLimits,
) -> tirx.PrimFunc:  # fmt: skip
    """The operator of the same name (`relax_models/operators.py`). A thread for each element of
    q, k and v, which are taken as one row."""
    dim, half = head_dim, rotary_dim // 2
    width = (num_heads + 2 * num_kv_heads) * dim
    with kernel(f"rotate_and_append_{num_heads}_{num_kv_heads}_{dim}") as (k, ib):
        q = k.buffer("q", ("num_tokens", num_heads * dim), "float32")
        key = k.buffer("k", ("num_tokens", num_kv_heads * dim), "float32")
        value = k.buffer("v", ("num_tokens", num_kv_heads * dim), "float32")
        rotary = k.buffer("rotary", ("num_tokens", rotary_dim), "float32")
        slots = k.buffer("slots", ("num_tokens",), "int32")
        page_shape = ("num_layers", "num_pages", 2 * num_kv_heads, page_size * dim)
        pages = k.buffer("pages", page_shape, kv_dtype, size_dtype="int64")
        layer = k.scalar("layer")
        out = k.buffer("out", ("num_tokens", num_heads * dim), "float32")

        def rotated(source: Any, token: Any, column: Any, d: Any) -> Any:
            """Element `column` of a row, which is element d of its head, after rotation."""
            if not half:
                return source[token, column]
            # The other element of the pair, and the sign with which it comes in.
            is_low = bind(d < half)
            is_rotated = bind(d < rotary_dim)
            angle = bind(T.Select(is_low, d, T.Select(is_rotated, d - half, 0)))
            other = bind(
                T.Select(is_low, column + half, T.Select(is_rotated, column - half, column))
            )
            mine, theirs = bind(source[token, column]), bind(source[token, other])
            cos, sin = bind(rotary[token, angle]), bind(rotary[token, half + angle])
            turned = mine * cos + T.Select(is_low, -theirs, theirs) * sin
            return bind(T.Select(is_rotated, turned, mine))

        threads = min(limits.max_threads, 256)
        with body(), elements(k.size("num_tokens") * width, threads) as at:
            token, column = bind(floor_div(at, width)), bind(floor_mod(at, width))
            d = bind(floor_mod(column, dim))

            def append() -> None:
                slot = bind(slots[token])
                page = bind(T.Cast("int64", floor_div(slot, page_size)))
                t = bind(floor_mod(slot, page_size))
                in_kv = bind(column - num_heads * dim)
                head = bind(floor_div(in_kv, dim))

                def append_key() -> None:
                    stored = T.Cast(kv_dtype, rotated(key, token, in_kv, d))
                    store(pages, stored, layer, page, head, d * page_size + t)

                def append_value() -> None:
                    stored = T.Cast(kv_dtype, value[token, in_kv - num_kv_heads * dim])
                    store(pages, stored, layer, page, head, t * dim + d)

                either(head < num_kv_heads, append_key, append_value)

            either(
                column < num_heads * dim,
                lambda: store(out, rotated(q, token, column, d), token, column),
                append,
            )
    return ib.get()
