"""Attention over KV pages: online softmax over blocks of keys, a tile of query rows at a time.

One unit of work is a (query tile, key head) pair; units run in parallel. All heads that share the
key head and all rows of a full tile go through a page together, so that a page is widened to
float32 once for `rows · group` dot products. Lanes are keys for q·k (pages hold keys transposed)
and head elements for p·v, so no reduction crosses lanes except one per block of keys.

Blocks of keys start at multiples of their size, and masked keys weigh exactly 0: a row's result is
the same, to the last bit, in a tile and alone.
"""

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import parallel
from .kernel import body, kernel, kernel_factory
from .vectors import (
    LANES,
    constant,
    dtype_of,
    exp2,
    local_array,
    ramp,
    reduce_max,
    reduce_sum,
    splat,
    to_float,
    vector_width,
)  # fmt: skip

KEY_BLOCK_PAGES = 8
MASKED = -1.0e30
LOWEST_MAXIMUM = -1.0e29
"""Where maxima start: so far above `MASKED` that masked keys weigh exactly 0, always."""


def query_tile(num_heads: int, num_kv_heads: int) -> int:
    """Rows of a full query tile: with the heads of a group, about 12 accumulators."""
    return max(1, 12 * num_kv_heads // num_heads)


@kernel_factory
def attention(
    *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, kv_dtype: str,
    scale: float, window: int | None,
) -> tirx.PrimFunc:  # fmt: skip
    """The operator of the same name (`relax_models/operators.py`).

    Tiles of `query_tile` rows are worked on together; shorter ones row by row.
    """
    if page_size != LANES:
        raise ValueError(f"page size {page_size}: these kernels need {LANES} tokens a page")
    tile_rows = query_tile(num_heads, num_kv_heads)
    name = f"attention_{num_heads}_{num_kv_heads}_{head_dim}_{window or 'full'}"
    with kernel(name) as (k, ib):
        unit = _Unit(num_heads // num_kv_heads, num_kv_heads, head_dim, scale, window, kv_dtype)
        unit.q = k.buffer("q", ("num_tokens", num_heads * head_dim), "float32")
        page_shape = ("num_layers", "num_pages", 2 * num_kv_heads, page_size * head_dim)
        unit.pages = k.buffer("pages", page_shape, kv_dtype)
        unit.tables = k.buffer("block_tables", ("num_sequences", "num_blocks"), "int32")
        unit.positions = k.buffer("positions", ("num_tokens",), "int32")
        tiles = k.buffer("query_tiles", ("num_tiles", 3), "int32")
        unit.layer = k.scalar("layer")
        unit.out = k.buffer("out", ("num_tokens", num_heads * head_dim), "float32")
        with body(), parallel(k.size("num_tiles") * num_kv_heads) as index:
            tile, head = B.Bind(index // num_kv_heads), B.Bind(index % num_kv_heads)
            unit.sequence, first, count = (B.Bind(tiles[tile, i]) for i in range(3))
            if tile_rows == 1:
                with B.serial(count) as row:
                    unit.emit(head, first + row, rows=1)
            else:
                with B.If(count == tile_rows):
                    with B.Then():
                        unit.emit(head, first, rows=tile_rows)
                    with B.Else(), B.serial(count) as row:
                        unit.emit(head, first + row, rows=1)
    return ib.get()


class _Unit:
    """Emits attention of `rows` consecutive query rows, all heads of one group."""

    q: Any
    pages: Any
    tables: Any
    positions: Any
    layer: Any
    out: Any
    sequence: Any

    def __init__(
        self, group: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None,
        kv_dtype: str,
    ) -> None:  # fmt: skip
        self.group, self.num_kv_heads, self.head_dim = group, num_kv_heads, head_dim
        self.scale, self.window, self.kv_dtype = scale * math.log2(math.e), window, kv_dtype
        self.width = vector_width(head_dim)

    def emit(self, head: Any, row: Any, *, rows: int) -> None:
        """`head`: key head, `row`: first query row."""
        self.head, self.row, self.rows = head, B.Bind(row), rows
        self.vectors = rows * self.group
        block = KEY_BLOCK_PAGES * LANES
        self.scores = local_array(self.vectors * block)
        self.sums = local_array(self.vectors * self.head_dim)
        self.maxima = local_array(self.vectors)
        self.totals = local_array(self.vectors)
        with B.serial(self.vectors) as v:
            B.buffer_store(self.maxima, T.float32(LOWEST_MAXIMUM), [v])
            B.buffer_store(self.totals, T.float32(0), [v])
            with B.serial(self.head_dim // self.width) as c:
                at = ramp(v * self.head_dim + c * self.width, self.width)
                B.buffer_store(self.sums, constant(0.0, self.width), [at])
        last = B.Bind(self.positions[self.row + (rows - 1)])
        end = B.Bind(last // LANES + 1)
        start = B.Bind(self._first_page())
        first_block = B.Bind(start // KEY_BLOCK_PAGES)
        with B.serial((end + (KEY_BLOCK_PAGES - 1)) // KEY_BLOCK_PAGES - first_block) as i:
            block_start = B.Bind((first_block + i) * KEY_BLOCK_PAGES)
            page = B.Bind(T.max(start, block_start))
            count = B.Bind(T.min(end, block_start + KEY_BLOCK_PAGES) - page)
            self._scores_of_block(page, count)
            self._softmax_of_block(count)
            self._add_values(page, count)
        with B.serial(self.vectors) as v:
            inverse = B.Bind(T.float32(1) / self.totals[v])
            with B.serial(self.head_dim // self.width) as c:
                at = ramp(v * self.head_dim + c * self.width, self.width)
                out_at = [
                    self.row + v // self.group,
                    ramp(self._query_start(v) + c * self.width, self.width),
                ]
                B.buffer_store(self.out, self.sums[at] * splat(inverse, self.width), out_at)

    def _first_page(self) -> Any:
        if self.window is None:
            return T.int32(0)
        return T.max(self.positions[self.row] - (self.window - 1), 0) // LANES

    def _query_start(self, vector: Any) -> Any:
        return (self.head * self.group + vector % self.group) * self.head_dim

    def _scores_of_block(self, page: Any, count: Any) -> None:
        """scores[v, t] = scale · q_v · k_t over the block, masked by position and window."""
        with B.serial(count) as p:
            number = B.Bind(T.Cast("int64", self.tables[self.sequence, page + p]))
            dots = local_array(self.vectors * LANES)
            for v in range(self.vectors):
                B.buffer_store(dots, constant(0.0), [ramp(v * LANES)])
            with B.serial(self.head_dim) as d:
                stored = self.pages[self.layer, number, self.head, ramp(d * LANES)]
                key = B.Bind(to_float(stored))
                for v in range(self.vectors):
                    q = self.q[self.row + v // self.group, self._query_start(v) + d]
                    at = ramp(v * LANES)
                    B.buffer_store(dots, dots[at] + splat(q) * key, [at])
            keys = B.Bind(ramp((page + p) * LANES))
            for v in range(self.vectors):
                position = splat(self.positions[self.row + v // self.group])
                seen = keys <= position
                if self.window is not None:
                    seen = T.And(seen, keys > position - splat(T.int32(self.window)))
                score = dots[ramp(v * LANES)] * constant(self.scale)
                masked = T.Select(seen, score, constant(MASKED))
                B.buffer_store(self.scores, masked, [self._score_at(v, p)])

    def _score_at(self, vector: Any, page: Any) -> Any:
        return ramp((vector * KEY_BLOCK_PAGES + page) * LANES)

    def _softmax_of_block(self, count: Any) -> None:
        """scores → exp2(scores - maximum); rescale what was summed under the old maximum."""
        with B.serial(self.vectors) as v:
            lanes = local_array(LANES)
            B.buffer_store(lanes, constant(MASKED), [ramp(0)])
            with B.serial(count) as p:
                score = self.scores[self._score_at(v, p)]
                B.buffer_store(lanes, T.max(lanes[ramp(0)], score), [ramp(0)])
            maximum = B.Bind(T.max(self.maxima[v], reduce_max(lanes[ramp(0)])))
            rescale = exp2(splat(self.maxima[v] - maximum))
            B.buffer_store(lanes, constant(0.0), [ramp(0)])
            with B.serial(count) as p:
                at = self._score_at(v, p)
                weight = exp2(self.scores[at] - splat(maximum))
                B.buffer_store(self.scores, weight, [at])
                B.buffer_store(lanes, lanes[ramp(0)] + weight, [ramp(0)])
            total = reduce_sum(lanes[ramp(0)])
            B.buffer_store(lanes, rescale, [ramp(0)])
            B.buffer_store(self.totals, self.totals[v] * lanes[0] + total, [v])
            B.buffer_store(self.maxima, maximum, [v])
            with B.serial(self.head_dim // self.width) as c:
                at = ramp(v * self.head_dim + c * self.width, self.width)
                value = self.sums[at] * lanes[ramp(0, self.width)]
                B.buffer_store(self.sums, value, [at])

    def _add_values(self, page: Any, count: Any) -> None:
        """sums[v] += Σ_t scores[v, t] · value_t, one vector of head elements at a time."""
        with B.serial(self.head_dim // self.width) as c:
            sums = local_array(self.vectors * self.width)

            def at(v: Any, c: Any = c) -> Any:
                return ramp(v * self.head_dim + c * self.width, self.width)

            for v in range(self.vectors):
                B.buffer_store(sums, self.sums[at(v)], [ramp(v * self.width, self.width)])
            with B.serial(count) as p:
                number = B.Bind(T.Cast("int64", self.tables[self.sequence, page + p]))
                with B.serial(LANES) as t:
                    element = ramp(t * self.head_dim + c * self.width, self.width)
                    stored = self.pages[self.layer, number, self.num_kv_heads + self.head, element]
                    value = B.Bind(T.Cast(dtype_of("float32", self.width), stored))
                    for v in range(self.vectors):
                        score = self.scores[(v * KEY_BLOCK_PAGES + p) * LANES + t]
                        own = ramp(v * self.width, self.width)
                        B.buffer_store(sums, sums[own] + splat(score, self.width) * value, [own])
            for v in range(self.vectors):
                B.buffer_store(self.sums, sums[ramp(v * self.width, self.width)], [at(v)])
