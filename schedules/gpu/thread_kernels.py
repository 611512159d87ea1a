"""RMSNorm and attention for CPUs that act as GPUs: a thread does all of a row by itself.

No shared memory, no barriers: see `register_linear`. Blocks are as small as such devices' vectors,
so that even the few rows of a decode step are several blocks.
"""

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .attention_block import LEAST, AttentionShape
from .kernel import (
    bind,
    body,
    ceil_div,
    floor_div,
    kernel,
    kernel_factory,
    launch,
    registers,
    store,
    when,
)

_THREADS = 4


@kernel_factory
def thread_rms_norm(size: int, epsilon: float, residual: bool) -> tirx.PrimFunc:
    """`norm.rms_norm`, a thread for each row."""
    with kernel(f"rms_norm_{size}{'_add' if residual else ''}") as (k, ib):
        x = k.buffer("x", ("rows", size), "float32")
        weight = k.buffer("weight", (size,), "float32")
        added = k.buffer("residual", ("rows", size), "float32") if residual else None
        y = k.buffer("y", ("rows", size), "float32")
        rows = k.size("rows")
        with body(), launch([ceil_div(rows, _THREADS)], [_THREADS]) as ((block,), (thread,)):
            row = bind(block * _THREADS + thread)
            with when(row < rows):
                total = registers(1)
                store(total, T.float32(0), 0)
                with B.serial(size) as i:
                    value = bind(x[row, i])
                    store(total, total[0] + value * value, 0)
                mean = total[0] * T.float32(1.0 / size)
                inverse = bind(T.float32(1) / T.sqrt(mean + T.float32(epsilon)))
                with B.serial(size) as i:
                    value = x[row, i] * inverse * weight[i]
                    store(y, value if added is None else added[row, i] + value, row, i)
    return ib.get()


@kernel_factory
def thread_attention(
    shape: AttentionShape, scale: float, window: int | None, *, softcap: float | None = None
) -> tirx.PrimFunc:
    """(q [m, heads · D], pages, tables [b, w], positions [m], tiles [m, 3], layer) → out like q.

    The operator of the same name (`relax_models/operators.py`) where every tile is one token. A
    thread for each token and head: softmax online, page by page.
    """
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    size = shape.page_size
    name = f"attention_{heads}_{kv_heads}_{dim}{'_window' if window else ''}"
    with kernel(name) as (k, ib):
        q = k.buffer("q", ("num_tokens", heads * dim), "float32")
        page_shape = ("num_layers", "num_pages", 2 * kv_heads, size * dim)
        pages = k.buffer("pages", page_shape, shape.kv_dtype, size_dtype="int64")
        tables = k.buffer("tables", ("num_sequences", "num_blocks"), "int32")
        positions = k.buffer("positions", ("num_tokens",), "int32")
        tiles = k.buffer("tiles", ("num_tiles", 3), "int32")
        layer = k.scalar("layer")
        out = k.buffer("out", ("num_tokens", heads * dim), "float32")
        blocks = [k.size("num_tiles"), -(-heads // _THREADS)]
        with body(), launch(blocks, [_THREADS]) as ((tile, part), (thread,)):
            head = bind(part * _THREADS + thread)
            with when(head < heads):
                sequence, token = bind(tiles[tile, 0]), bind(tiles[tile, 1])
                position = bind(positions[token])
                first: Any = T.int32(0)
                if window is not None:
                    first = bind(T.max(position - (window - 1), 0))
                first_page = bind(floor_div(first, size))
                num_pages = bind(floor_div(position, size) + 1 - first_page)
                kv_head = bind(floor_div(head, shape.group))
                state, weights, sums = registers(2), registers(size), registers(dim)
                store(state, T.float32(LEAST), 0)
                store(state, T.float32(0), 1)
                with B.serial(dim) as d:
                    store(sums, T.float32(0), d)
                with B.serial(num_pages) as turn:
                    block = bind(first_page + turn)
                    page = bind(T.Cast("int64", tables[sequence, block]))

                    def key(d: Any, t: int) -> Any:
                        return T.Cast("float32", pages[layer, page, kv_head, d * size + t])

                    def value(t: int, d: Any) -> Any:
                        at = t * dim + d
                        return T.Cast("float32", pages[layer, page, kv_head + kv_heads, at])

                    for t in range(size):
                        store(weights, T.float32(0), t)
                    with B.serial(dim) as d:
                        query = bind(q[token, head * dim + d])
                        for t in range(size):
                            store(weights, weights[t] + query * key(d, t), t)
                    largest: Any = state[0]
                    for t in range(size):
                        place = bind(block * size + t)
                        # One comparison: SwiftShader's compiler does not end with two of them here.
                        is_seen: Any = place <= position
                        if window is not None:
                            is_seen = T.Cast("uint32", position - place) < T.uint32(window)
                        scaled = _score(weights[t], scale, softcap)
                        store(weights, T.Select(is_seen, scaled, T.float32(LEAST)), t)
                        largest = T.max(largest, weights[t])
                    largest = bind(largest)
                    factor = bind(T.exp2(state[0] - largest))
                    total: Any = state[1] * factor
                    for t in range(size):
                        store(weights, T.exp2(weights[t] - largest), t)
                        total = total + weights[t]
                    store(state, total, 1)
                    store(state, largest, 0)
                    with B.serial(dim) as d:
                        added: Any = sums[d] * factor
                        for t in range(size):
                            added = added + weights[t] * value(t, d)
                        store(sums, added, d)
                inverse = bind(T.float32(1) / state[1])
                with B.serial(dim) as d:
                    store(out, sums[d] * inverse, token, head * dim + d)
    return ib.get()


def _score(product: Any, scale: float, softcap: float | None) -> Any:
    """The power of two that a key's weight is: scale · q · k, capped, times log2 e."""
    log2_e = math.log2(math.e)
    if softcap is None:
        return product * T.float32(scale * log2_e)
    # tanh(t) = 1 - 2 / (1 + exp(2 t)), which is 1 in float32 beyond 10.
    t = T.max(T.min(product * T.float32(scale / softcap), T.float32(10)), T.float32(-10))
    power = T.exp2(t * T.float32(2 * log2_e))
    return (T.float32(1) - T.float32(2) / (T.float32(1) + power)) * T.float32(softcap * log2_e)
