"""The keys of one split of a context, reduced to a `State`: online softmax over blocks of keys.

All heads that share a key head and all rows of a tile go through a page together, so that a page is
widened to float32 once for `rows · group` dot products. Lanes are keys for q·k (pages hold keys
transposed) and head elements for p·v, so no reduction crosses lanes except one per block of keys.
Enough sums are kept at once to hide the latency of a multiply-add: of several pages for q·k, of
several vectors of head elements for p·v.

Blocks of keys start at multiples of their size, and masked keys weigh exactly 0.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .attention_state import LOWEST_MAXIMUM, Heads, State
from .control import for_tiles
from .isa import CpuIsa
from .vectors import (
    LANES,
    constant,
    dtype_of,
    exp2,
    fma,
    local_array,
    ramp,
    reduce_max,
    reduce_sum,
    splat,
    to_float,
)  # fmt: skip

BLOCK_PAGES = 8
MASKED = 10 * LOWEST_MAXIMUM


def max_sums(isa: CpuIsa) -> int:
    """Vectors that are summed at once: three quarters of the registers, at most 16."""
    return min(16, isa.num_registers * isa.lanes // LANES * 3 // 4)


@dataclass(frozen=True, slots=True)
class Tensors:
    """Buffers, as in `attention`."""

    q: Any
    pages: Any
    tables: Any
    positions: Any
    layer: Any


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of keys that rows see: from `first` up to `end`, int32; of pages likewise."""

    first: Any
    end: Any
    first_page: Any
    end_page: Any


@dataclass(frozen=True, slots=True)
class KeyPages:
    """Where keys of a sequence and a key head are: pages from `first` to `last`, int32."""

    sequence: Any
    head: Any
    first: Any
    last: Any


def choose_pages(condition: Any, pages: KeyPages, others: KeyPages) -> KeyPages:
    """`pages` if the condition holds, else `others`."""
    pairs = [(getattr(pages, f.name), getattr(others, f.name)) for f in fields(KeyPages)]
    return KeyPages(*(B.Bind(T.if_then_else(condition, *pair)) for pair in pairs))


def blocks_of(positions: Any, row: Any, rows: int, window: int | None) -> Blocks:
    """What `rows` consecutive rows see together."""
    end_page = B.Bind(positions[row + (rows - 1)] // LANES + 1)
    first_page: Any = T.int32(0)
    if window is not None:
        first_page = B.Bind(T.max(positions[row] - (window - 1), 0) // LANES)
    end = B.Bind((end_page + (BLOCK_PAGES - 1)) // BLOCK_PAGES)
    return Blocks(B.Bind(first_page // BLOCK_PAGES), end, first_page, end_page)


class Rows:
    """Emits attention of `rows` consecutive query rows, all heads of one group."""

    def __init__(
        self, tensors: Tensors, heads: Heads, scale: float, window: int | None, *, rows: int,
        max_sums: int, sequence: Any, head: Any, row: Any,
    ) -> None:  # fmt: skip
        """`head`: key head, `row`: first query row; `max_sums`: vectors that are summed at once."""
        self.tensors, self.heads, self.rows = tensors, heads, rows
        self.scale, self.window = scale * math.log2(math.e), window
        self.sequence, self.head, self.row = sequence, head, row
        self.num_vectors = rows * heads.group
        self.max_sums = max(max_sums, self.num_vectors)
        # A single row does little with what it loads: it asks for pages ahead of time.
        self.from_memory = rows == 1
        self.scores = local_array(self.num_vectors * BLOCK_PAGES * LANES)
        self.rescale = local_array(self.num_vectors * LANES)

    def add_split(
        self, state: State, blocks: Blocks, first: Any, num: Any, step: int,
        upcoming: KeyPages | None,
    ) -> None:  # fmt: skip
        """The keys of `num` blocks, every `step`th from `first` on. Of a single row: meanwhile
        those of the block that comes next are asked for, after the last one `upcoming`."""
        with B.serial(num) as i:
            start = B.Bind((first + i * step) * BLOCK_PAGES)
            page = B.Bind(T.max(blocks.first_page, start))
            count = B.Bind(T.min(blocks.end_page, start + BLOCK_PAGES) - page)
            self._scores_of_block(page, count)
            self._softmax_of_block(state, count)
            following = None
            if upcoming is not None:
                first_page, last_page = start + step * BLOCK_PAGES, blocks.end_page - 1
                own = KeyPages(self.sequence, self.head, first_page, last_page)
                following = choose_pages(i == num - 1, upcoming, own)
            self._add_values(state, page, count, following)

    def write(self, out: Any, state: State) -> None:
        """The finished rows."""
        width = self.heads.width
        with B.serial(self.num_vectors) as v:
            inverse = B.Bind(T.float32(1) / state.total(v))
            with B.serial(self.heads.num_chunks) as c:
                at = [
                    self.row + v // self.heads.group,
                    ramp(self._query_start(v) + c * width, width),
                ]
                B.buffer_store(out, state.sums(v, c) * splat(inverse, width), at)

    def _query_start(self, vector: Any) -> Any:
        return (self.head * self.heads.group + vector % self.heads.group) * self.heads.head_dim

    def _page_number(self, sequence: Any, page: Any) -> Any:
        return B.Bind(T.Cast("int64", self.tensors.tables[sequence, page]))

    def _scores_of_block(self, page: Any, count: Any) -> None:
        """scores[v, t] = scale · q_v · k_t over the block, masked by position and window."""
        together = 1 << (self.max_sums // self.num_vectors).bit_length() - 1
        sizes = [1 << i for i in range(together.bit_length())]

        def emit(p: Any, num_pages: int) -> None:
            self._scores_of_pages(page, p, num_pages)

        for_tiles(T.int32(0), count, tuple(reversed(sizes)), emit)

    def _scores_of_pages(self, page: Any, p: Any, num_pages: int) -> None:
        tensors, vectors = self.tensors, range(self.num_vectors)
        numbers = [self._page_number(self.sequence, page + p + i) for i in range(num_pages)]
        dots = local_array(self.num_vectors * num_pages * LANES)

        def at(v: int, i: int) -> Any:
            return ramp((v * num_pages + i) * LANES)

        for v in vectors:
            for i in range(num_pages):
                B.buffer_store(dots, constant(0.0), [at(v, i)])
        unrolled = math.gcd(self.heads.head_dim, 2)
        with B.serial(self.heads.head_dim // unrolled) as step:
            if self.from_memory:
                for number in numbers:
                    value = self.heads.num_kv_heads + self.head
                    self._prefetch(number, value, step * (unrolled * LANES))
            for d in (step * unrolled + u for u in range(unrolled)):
                keys = [
                    B.Bind(to_float(tensors.pages[tensors.layer, n, self.head, ramp(d * LANES)]))
                    for n in numbers
                ]
                for v in vectors:
                    q = splat(tensors.q[self.row + v // self.heads.group, self._query_start(v) + d])
                    q = q if num_pages == 1 else B.Bind(q)
                    for i, key in enumerate(keys):
                        B.buffer_store(dots, fma(q, key, dots[at(v, i)], LANES), [at(v, i)])
        for i in range(num_pages):
            keys_at = B.Bind(ramp((page + p + i) * LANES))
            for v in vectors:
                position = splat(tensors.positions[self.row + v // self.heads.group])
                seen = keys_at <= position
                if self.window is not None:
                    seen = T.And(seen, keys_at > position - splat(T.int32(self.window)))
                score = dots[at(v, i)] * constant(self.scale)
                masked = T.Select(seen, score, constant(MASKED))
                B.buffer_store(self.scores, masked, [self._score_at(v, p + i)])

    def _score_at(self, vector: Any, page: Any) -> Any:
        return ramp((vector * BLOCK_PAGES + page) * LANES)

    def _softmax_of_block(self, state: State, count: Any) -> None:
        """scores → exp2(scores - maximum); what the sums under the old maximum are to be scaled
        by, in all lanes → rescale."""
        with B.serial(self.num_vectors) as v:
            lanes = local_array(LANES)
            B.buffer_store(lanes, constant(MASKED), [ramp(0)])
            with B.serial(count) as p:
                score = self.scores[self._score_at(v, p)]
                B.buffer_store(lanes, T.max(lanes[ramp(0)], score), [ramp(0)])
            maximum = B.Bind(T.max(state.maximum(v), reduce_max(lanes[ramp(0)])))
            rescale = exp2(splat(state.maximum(v) - maximum))
            B.buffer_store(self.rescale, rescale, [ramp(v * LANES)])
            B.buffer_store(lanes, constant(0.0), [ramp(0)])
            with B.serial(count) as p:
                at = self._score_at(v, p)
                weight = exp2(self.scores[at] - splat(maximum))
                B.buffer_store(self.scores, weight, [at])
                B.buffer_store(lanes, lanes[ramp(0)] + weight, [ramp(0)])
            total = reduce_sum(lanes[ramp(0)])
            own = state.total(v)
            state.set_weights(v, maximum, fma(own, self.rescale[v * LANES], total))

    def _add_values(self, state: State, page: Any, count: Any, following: KeyPages | None) -> None:
        """sums[v] = sums[v] · rescale[v] + Σ_t scores[v, t] · value_t, some vectors of head
        elements at a time. `following`: the keys to ask for meanwhile."""
        width, num_chunks = self.heads.width, self.heads.num_chunks
        together = next(
            n for n in range(num_chunks, 0, -1)
            if num_chunks % n == 0 and (n == 1 or n * self.num_vectors <= self.max_sums)
        )  # fmt: skip
        pairs = [(v, c) for v in range(self.num_vectors) for c in range(together)]
        with B.serial(num_chunks // together) as group:
            sums = local_array(len(pairs) * width)

            def at(v: int, c: int) -> Any:
                return ramp((v * together + c) * width, width)

            for v, c in pairs:
                old = state.sums(v, group * together + c)
                B.buffer_store(sums, old * self.rescale[ramp(v * LANES, width)], [at(v, c)])
            with B.serial(count) as p:
                number = self._page_number(self.sequence, page + p)
                if following is not None:
                    next_page = T.min(following.first + p, following.last)
                    next_number = self._page_number(following.sequence, next_page)
                with B.serial(LANES) as t:
                    start = t * self.heads.head_dim + group * (together * width)
                    if following is not None:
                        for c in range(0, together, 2):
                            self._prefetch(next_number, following.head, start + c * width)
                    values = [self._value(number, start + c * width) for c in range(together)]
                    for v in range(self.num_vectors):
                        weight = splat(self.scores[(v * BLOCK_PAGES + p) * LANES + t], width)
                        weight = weight if together == 1 else B.Bind(weight)
                        for c, value in enumerate(values):
                            new = fma(weight, value, sums[at(v, c)], width)
                            B.buffer_store(sums, new, [at(v, c)])
            for v, c in pairs:
                state.set_sums(v, group * together + c, sums[at(v, c)])

    def _prefetch(self, number: Any, head: Any, element: Any) -> None:
        tensors = self.tensors
        address = T.address_of(tensors.pages[tensors.layer, number, head, element])
        read, to_l2, data = T.int32(0), T.int32(2), T.int32(1)
        B.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", address, read, to_l2, data))

    def _value(self, number: Any, element: Any) -> Any:
        width, tensors = self.heads.width, self.tensors
        head = self.heads.num_kv_heads + self.head
        stored = tensors.pages[tensors.layer, number, head, ramp(element, width)]
        return B.Bind(T.Cast(dtype_of("float32", width), stored))
