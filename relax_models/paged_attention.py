"""Keys and values in pages, and attention over them: the plain definition.

Pages are one tensor for all layers,

    pages: [num_layers, num_pages, 2 · kv_heads, page_size · head_dim]

    key head h:    pages[l, p, h, d · page_size + t]             keys transposed, so that one
    value head h:  pages[l, p, kv_heads + h, t · head_dim + d]   vector holds one d of all t

for token t of a page and element d of a head. A block table lists the pages of a sequence; the
token at position i is token i % page_size of page block_table[i // page_size].

Layout, and the split of work into query tiles, after PagedAttention (Kwon et al., 2023) and
FlashAttention (Dao et al., 2022). The functions here are serial loops: the oracle for the
kernels in `schedules/`, and the fallback of targets without one.
"""

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from .config import DecoderConfig

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Constants of the attention of one model; `kv_dtype` is the dtype of the pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    page_size: int
    kv_dtype: str

    @staticmethod
    def of(config: DecoderConfig, kv_dtype: str, rotary_dim: int) -> "HeadShape":
        return HeadShape(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            rotary_dim,
            PAGE_SIZE,
            kv_dtype,
        )

    def constants(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def rotate_and_append(shape: HeadShape) -> tirx.PrimFunc:
    """(q, k, v, rotary, slots, pages, layer) → q rotated, pages (in place)."""
    HQ, HK, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    PS, R, dtype = shape.page_size, shape.rotary_dim, shape.kv_dtype
    H2 = R // 2

    @T.prim_func(s_tir=True)
    def func(
        q_h: T.handle, k_h: T.handle, v_h: T.handle, rotary_h: T.handle, slots_h: T.handle,
        pages_h: T.handle, layer: T.int64, out_h: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        m = T.int64()
        num_layers = T.int64()
        num_pages = T.int64()
        q = T.match_buffer(q_h, (m, HQ * D), "float32")
        k = T.match_buffer(k_h, (m, HK * D), "float32")
        v = T.match_buffer(v_h, (m, HK * D), "float32")
        rotary = T.match_buffer(rotary_h, (m, R), "float32")
        slots = T.match_buffer(slots_h, (m,), "int32")
        pages = T.match_buffer(pages_h, (num_layers, num_pages, 2 * HK, PS * D), dtype)
        out = T.match_buffer(out_h, (m, HQ * D), "float32")
        for i in T.serial(m):
            with T.sblock("row"):
                T.reads(q[0:m, 0 : HQ * D], k[0:m, 0 : HK * D], v[0:m, 0 : HK * D])
                T.writes(
                    out[0:m, 0 : HQ * D], pages[0:num_layers, 0:num_pages, 0 : 2 * HK, 0 : PS * D]
                )
                for h, d in T.grid(HQ, D):
                    out[i, h * D + d] = q[i, h * D + d]
                    if d < H2:
                        out[i, h * D + d] = (
                            q[i, h * D + d] * rotary[i, d]
                            - q[i, h * D + d + H2] * rotary[i, H2 + d]
                        )
                    elif d < R:
                        out[i, h * D + d] = (
                            q[i, h * D + d] * rotary[i, d - H2]
                            + q[i, h * D + d - H2] * rotary[i, d]
                        )
                for h, d in T.grid(HK, D):
                    page: T.let[T.int64] = T.Cast("int64", slots[i] // PS)
                    t: T.let[T.int64] = T.Cast("int64", slots[i] % PS)
                    pages[layer, page, h, d * PS + t] = T.Cast(dtype, k[i, h * D + d])
                    if d < H2:
                        pages[layer, page, h, d * PS + t] = T.Cast(
                            dtype,
                            k[i, h * D + d] * rotary[i, d]
                            - k[i, h * D + d + H2] * rotary[i, H2 + d],
                        )
                    elif d < R:
                        pages[layer, page, h, d * PS + t] = T.Cast(
                            dtype,
                            k[i, h * D + d] * rotary[i, d - H2]
                            + k[i, h * D + d - H2] * rotary[i, d],
                        )
                    pages[layer, page, HK + h, t * D + d] = T.Cast(dtype, v[i, h * D + d])

    return func


@functools.cache
def attention(shape: HeadShape, scale: float, window: int | None) -> tirx.PrimFunc:
    """(q, pages, block_tables, positions, query_tiles, layer) → out; softmax online."""
    HQ, HK, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    PS, dtype = shape.page_size, shape.kv_dtype
    G = HQ // HK
    SCALE = scale * math.log2(math.e)
    WINDOW = window or 0

    @T.prim_func(s_tir=True)
    def func(
        q_h: T.handle, pages_h: T.handle, tables_h: T.handle, positions_h: T.handle,
        tiles_h: T.handle, layer: T.int64, out_h: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        m = T.int64()
        num_layers = T.int64()
        num_pages = T.int64()
        b = T.int64()
        w = T.int64()
        num_tiles = T.int64()
        q = T.match_buffer(q_h, (m, HQ * D), "float32")
        pages = T.match_buffer(pages_h, (num_layers, num_pages, 2 * HK, PS * D), dtype)
        tables = T.match_buffer(tables_h, (b, w), "int32")
        positions = T.match_buffer(positions_h, (m,), "int32")
        tiles = T.match_buffer(tiles_h, (num_tiles, 3), "int32")
        out = T.match_buffer(out_h, (m, HQ * D), "float32")
        for tile in T.serial(num_tiles):
            with T.sblock("tile"):
                T.reads(
                    q[0:m, 0 : HQ * D], pages[0:num_layers, 0:num_pages, 0 : 2 * HK, 0 : PS * D]
                )
                T.writes(out[0:m, 0 : HQ * D])
                state = T.sblock_alloc_buffer((4,), "float32")
                for r, h in T.grid(tiles[tile, 2], HQ):
                    i: T.let[T.int32] = tiles[tile, 1] + r
                    s: T.let[T.int32] = tiles[tile, 0]
                    last: T.let[T.int32] = positions[i]
                    first: T.let[T.int32] = T.if_then_else(
                        WINDOW > 0, T.max(0, last - WINDOW + 1), 0
                    )
                    state[0] = T.float32(-3.0e38)
                    state[1] = T.float32(0)
                    for d in T.serial(D):
                        out[i, h * D + d] = T.float32(0)
                    for n in T.serial(last - first + 1):
                        j: T.let[T.int32] = first + n
                        page: T.let[T.int32] = tables[s, j // PS]
                        state[2] = T.float32(0)
                        for d in T.serial(D):
                            state[2] = state[2] + q[i, h * D + d] * T.Cast(
                                "float32", pages[layer, page, h // G, d * PS + j % PS]
                            )
                        state[2] = state[2] * T.float32(SCALE)
                        state[3] = T.max(state[0], state[2])
                        state[1] = state[1] * T.exp2(state[0] - state[3]) + T.exp2(
                            state[2] - state[3]
                        )
                        for d in T.serial(D):
                            out[i, h * D + d] = out[i, h * D + d] * T.exp2(
                                state[0] - state[3]
                            ) + T.exp2(state[2] - state[3]) * T.Cast(
                                "float32", pages[layer, page, HK + h // G, (j % PS) * D + d]
                            )
                        state[0] = state[3]
                    for d in T.serial(D):
                        out[i, h * D + d] = out[i, h * D + d] / state[1]

    return func
