"""RoPE: the table of cosines and sines, and rotation fused with the append to the KV pages."""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows
from .kernel import body, kernel, kernel_factory
from .vectors import dtype_of, local_array, ramp, vector_width


@kernel_factory
def rotary_table(half: int, scale: float) -> tirx.PrimFunc:
    """(positions [m] int32, inv_freq [half]) → [m, 2 · half]: cosines, then sines, times scale."""
    with kernel(f"rotary_table_{half}") as (k, ib):
        positions = k.buffer("positions", ("num_tokens",), "int32")
        inv_freq = k.buffer("inv_freq", (half,), "float32")
        table = k.buffer("table", ("num_tokens", 2 * half), "float32")

        def emit(row: Any) -> None:
            position = B.Bind(T.Cast("float32", positions[row]))
            with B.serial(half) as i:
                angle = B.Bind(position * inv_freq[i])
                B.buffer_store(table, T.cos(angle) * T.float32(scale), [row, i])
                B.buffer_store(table, T.sin(angle) * T.float32(scale), [row, half + i])

        with body():
            for_rows(k.size("num_tokens"), half * 64, emit)  # a cosine is as much as 32 elements
    return ib.get()


@kernel_factory
def rotate_and_append(
    *, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, page_size: int,
    kv_dtype: str,
) -> tirx.PrimFunc:  # fmt: skip
    """The operator of the same name (`relax_models/operators.py`), a row of tokens at a time.

    Keys go into their page transposed, one element a store; everything else is vectors.
    """
    half = rotary_dim // 2
    width = vector_width(half) if half else 1
    with kernel(f"rotate_and_append_{num_heads}_{num_kv_heads}_{head_dim}") as (k, ib):
        q = k.buffer("q", ("num_tokens", num_heads * head_dim), "float32")
        key = k.buffer("k", ("num_tokens", num_kv_heads * head_dim), "float32")
        value = k.buffer("v", ("num_tokens", num_kv_heads * head_dim), "float32")
        rotary = k.buffer("rotary", ("num_tokens", rotary_dim), "float32")
        slots = k.buffer("slots", ("num_tokens",), "int32")
        page_shape = ("num_layers", "num_pages", 2 * num_kv_heads, page_size * head_dim)
        pages = k.buffer("pages", page_shape, kv_dtype)
        layer = k.scalar("layer")
        out = k.buffer("out", ("num_tokens", num_heads * head_dim), "float32")

        def emit(row: Any) -> None:
            page = B.Bind(T.Cast("int64", slots[row]) // page_size)
            token = B.Bind(T.Cast("int64", slots[row]) % page_size)

            def rotated(source: Any, start: Any, i: Any) -> tuple[Any, Any]:
                at, above = ramp(i * width, width), ramp(half + i * width, width)
                low = B.Bind(source[row, ramp(start + i * width, width)])
                high = B.Bind(source[row, ramp(start + half + i * width, width)])
                cos, sin = B.Bind(rotary[row, at]), B.Bind(rotary[row, above])
                return B.Bind(low * cos - high * sin), B.Bind(high * cos + low * sin)

            with B.serial(num_heads) as h:
                with B.serial(half // width) as i:
                    low, high = rotated(q, h * head_dim, i)
                    start = h * head_dim + i * width
                    B.buffer_store(out, low, [row, ramp(start, width)])
                    B.buffer_store(out, high, [row, ramp(start + half, width)])
                with B.serial(head_dim - rotary_dim) as d:
                    at = h * head_dim + rotary_dim + d
                    B.buffer_store(out, q[row, at], [row, at])
            turned = local_array(head_dim)
            vwidth = vector_width(head_dim)
            with B.serial(num_kv_heads) as h:
                with B.serial(half // width) as i:
                    low, high = rotated(key, h * head_dim, i)
                    B.buffer_store(turned, low, [ramp(i * width, width)])
                    B.buffer_store(turned, high, [ramp(half + i * width, width)])
                with B.serial(head_dim - rotary_dim) as d:
                    element = key[row, h * head_dim + rotary_dim + d]
                    B.buffer_store(turned, element, [rotary_dim + d])
                with B.serial(head_dim) as d:
                    stored = T.Cast(kv_dtype, turned[d])
                    B.buffer_store(pages, stored, [layer, page, h, d * page_size + token])
                with B.serial(head_dim // vwidth) as c:
                    vector = value[row, ramp(h * head_dim + c * vwidth, vwidth)]
                    stored = T.Cast(dtype_of(kv_dtype, vwidth), vector)
                    at = ramp(token * head_dim + c * vwidth, vwidth)
                    B.buffer_store(pages, stored, [layer, page, num_kv_heads + h, at])

        with body():
            work_per_row = (num_heads + 4 * num_kv_heads) * head_dim
            for_rows(k.size("num_tokens"), work_per_row, emit)
    return ib.get()
