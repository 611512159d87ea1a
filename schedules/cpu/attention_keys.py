"""The keys of one split of a context, reduced to a `State`: online softmax over blocks of keys.

All heads that share a key head and all rows of a tile go through pages together, some query vectors
at a time: as many as registers hold sums of with several pages (q·k) or several vectors of head
elements (p·v). That hides the latency of a multiply-add, and whatever is loaded serves several of
them. Lanes are keys for q·k (pages hold keys transposed) and head elements for p·v, so no reduction
crosses lanes except one per block of keys.

Blocks of keys start at multiples of their size, and masked keys weigh exactly 0. A block is reduced
on its own, with weights relative to its own largest score, then merged.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .attention_state import LOWEST_MAXIMUM, Heads, State, padded
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
    splat,
    to_float,
)  # fmt: skip

BLOCK_PAGES = 8
MASKED = 10 * LOWEST_MAXIMUM
_MAX_SUMS = 16


def max_loaded(isa: CpuIsa, num_vectors: int) -> int:
    """Vectors of keys or values that `num_vectors` of queries or scores are multiplied with at
    once: registers hold a sum for each pair, what is loaded, and one that is broadcast."""
    registers = isa.num_registers * isa.lanes // LANES
    return min(_MAX_SUMS // num_vectors, (registers - 1) // (num_vectors + 1))


def parts_of(isa: CpuIsa, num_vectors: int) -> tuple[int, int]:
    """In how many parts so many query vectors are worked on, and the vectors of a part.

    Where a register holds a whole vector, loads are as scarce as multiplications: there each load
    serves at least two.
    """
    least = 2 if isa.lanes == LANES else 1
    largest = max(n for n in range(1, _MAX_SUMS) if n == 1 or max_loaded(isa, n) >= least)
    num_parts = -(-num_vectors // largest)
    return num_parts, -(-num_vectors // num_parts)


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
    """Emits attention of up to `rows` consecutive query rows, all heads of one group.

    Their query vectors are numbered by row, then by head.
    """

    def __init__(
        self, tensors: Tensors, heads: Heads, scale: float, window: int | None, *, rows: int,
        isa: CpuIsa, sequence: Any, head: Any, row: Any, count: Any,
    ) -> None:  # fmt: skip
        """`head`: key head, `row`: first query row; `count`: how many rows there are."""
        self.tensors, self.heads, self.window = tensors, heads, window
        self.sequence, self.head, self.row, self.count = sequence, head, row, count
        self.rows = rows
        num_parts, self.together = parts_of(isa, rows * heads.group)
        self.max_loaded = max(1, max_loaded(isa, self.together))
        self.num_vectors = num_vectors = num_parts * self.together
        self.used_vectors = B.Bind(count * heads.group)
        self.num_parts = B.Bind((self.used_vectors + (self.together - 1)) // self.together)
        # A single row does little with what it loads: it asks for pages ahead of time.
        self.from_memory = rows == 1
        self.queries = local_array(num_vectors * heads.head_dim)
        self.scores = local_array(num_vectors * BLOCK_PAGES * LANES)
        self.maxima, self.own_factors, self.block_factors = (
            local_array(padded(num_vectors)) for _ in range(3)
        )
        self._load_queries(scale * math.log2(math.e))

    def _load_queries(self, scale: float) -> None:
        """Rows that are missing are the last one again."""
        width, size = self.heads.width, self.heads.group * self.heads.head_dim
        with B.serial(self.rows) as i:
            row = B.Bind(self.row + T.min(i, self.count - 1))
            with B.serial(size // width) as c:
                query = self.tensors.q[row, ramp(self.head * size + c * width, width)]
                at = ramp(i * size + c * width, width)
                B.buffer_store(self.queries, query * constant(scale, width), [at])
        for at in range(self.rows * size, self.num_vectors * self.heads.head_dim, width):
            B.buffer_store(self.queries, constant(0.0, width), [ramp(at, width)])

    def add_block(
        self, state: State, blocks: Blocks, block: Any, following: KeyPages | None = None
    ) -> None:
        """The keys of a block → state. `following`: the keys to ask for meanwhile."""
        start = B.Bind(block * BLOCK_PAGES)
        page = B.Bind(T.max(blocks.first_page, start))
        count = B.Bind(T.min(blocks.end_page, start + BLOCK_PAGES) - page)
        self._scores_of_block(page, count)
        self._mask(page, count)
        self._softmax_of_block(state, count)
        self._add_values(state, page, count, following)

    def write(self, out: Any, state: State) -> None:
        """The finished rows."""
        width, group, chunks = self.heads.width, self.heads.group, self.heads.num_chunks
        with B.serial(self.count) as i, B.serial(group) as h:
            v = B.Bind(i * group + h)
            inverse = state.inverse(v)
            with B.serial(chunks) as c:
                at = ramp(((self.head * group + h) * chunks + c) * width, width)
                value = state.sums(v, c) * splat(inverse, width)
                B.buffer_store(out, value, [self.row + i, at])

    def _page_number(self, sequence: Any, page: Any) -> Any:
        return B.Bind(T.Cast("int64", self.tensors.tables[sequence, page]))

    def _scores_of_block(self, page: Any, count: Any) -> None:
        """scores[v, t] = scale · q_v · k_t over the block."""
        sizes = [1 << i for i in range(min(self.max_loaded, BLOCK_PAGES).bit_length())]

        def emit(p: Any, num_pages: int) -> None:
            self._scores_of_pages(page, p, num_pages)

        for_tiles(T.int32(0), count, tuple(reversed(sizes)), emit)

    def _scores_of_pages(self, page: Any, p: Any, num_pages: int) -> None:
        tensors, vectors, head_dim = self.tensors, range(self.together), self.heads.head_dim
        numbers = [self._page_number(self.sequence, page + p + i) for i in range(num_pages)]
        with B.serial(self.num_parts) as part:
            first = B.Bind(part * self.together)
            dots = local_array(self.together * num_pages * LANES)

            def at(v: int, i: int) -> Any:
                return ramp((v * num_pages + i) * LANES)

            for v in vectors:
                for i in range(num_pages):
                    B.buffer_store(dots, constant(0.0), [at(v, i)])
            unrolled = math.gcd(head_dim, 2)
            with B.serial(head_dim // unrolled) as step:
                if self.from_memory:
                    for number in numbers:
                        value = self.heads.num_kv_heads + self.head
                        self._prefetch(number, value, step * (unrolled * LANES))
                for d in (step * unrolled + u for u in range(unrolled)):
                    elements = ramp(d * LANES)
                    keys = [
                        B.Bind(to_float(tensors.pages[tensors.layer, n, self.head, elements]))
                        for n in numbers
                    ]
                    for v in vectors:
                        q = splat(self.queries[(first + v) * head_dim + d])
                        q = q if num_pages == 1 else B.Bind(q)
                        for i, key in enumerate(keys):
                            B.buffer_store(dots, fma(q, key, dots[at(v, i)], LANES), [at(v, i)])
            for v in vectors:
                for i in range(num_pages):
                    B.buffer_store(self.scores, dots[at(v, i)], [self._score_at(first + v, p + i)])

    def _mask(self, page: Any, count: Any) -> None:
        """Scores of keys that a row must not see → MASKED, in the pages that have any."""
        positions = self.tensors.positions
        lowest, highest = (
            B.Bind(positions[row]) for row in (self.row, self.row + (self.count - 1))
        )
        with B.serial(count) as p:
            first = B.Bind((page + p) * LANES)
            partly = first + (LANES - 1) > lowest
            if self.window is not None:
                partly = T.Or(partly, first <= highest - self.window)
            with B.If(partly), B.Then(), B.serial(self.count) as i:
                keys, position = B.Bind(ramp(first)), B.Bind(splat(positions[self.row + i]))
                seen = keys <= position
                if self.window is not None:
                    seen = T.And(seen, keys > position - splat(T.int32(self.window)))
                with B.serial(self.heads.group) as h:
                    at = self._score_at(i * self.heads.group + h, p)
                    masked = T.Select(seen, self.scores[at], constant(MASKED))
                    B.buffer_store(self.scores, masked, [at])

    def _score_at(self, vector: Any, page: Any) -> Any:
        return ramp((vector * BLOCK_PAGES + page) * LANES)

    def _softmax_of_block(self, state: State, count: Any) -> None:
        """scores → exp2(scores - their maximum); their totals and maxima → state."""
        with B.serial(self.used_vectors) as v:
            lanes = local_array(LANES)
            B.buffer_store(lanes, constant(LOWEST_MAXIMUM), [ramp(0)])
            with B.serial(count) as p:
                score = self.scores[self._score_at(v, p)]
                B.buffer_store(lanes, T.max(lanes[ramp(0)], score), [ramp(0)])
            B.buffer_store(self.maxima, reduce_max(lanes[ramp(0)]), [v])
        state.merge_maxima(self.maxima, self.own_factors, self.block_factors)
        with B.serial(self.used_vectors) as v:
            lanes = local_array(LANES)
            B.buffer_store(lanes, constant(0.0), [ramp(0)])
            with B.serial(count) as p:
                at = self._score_at(v, p)
                weight = exp2(self.scores[at] - splat(self.maxima[v]))
                B.buffer_store(self.scores, weight, [at])
                B.buffer_store(lanes, lanes[ramp(0)] + weight, [ramp(0)])
            state.merge_total(v, lanes[ramp(0)], self.own_factors[v], self.block_factors[v])

    def _add_values(self, state: State, page: Any, count: Any, following: KeyPages | None) -> None:
        """Σ_t scores[v, t] · value_t → state, some vectors of head elements at a time.
        `following`: the keys to ask for meanwhile."""
        width, num_chunks, head_dim = self.heads.width, self.heads.num_chunks, self.heads.head_dim
        chunks = max(n for n in range(1, self.max_loaded + 1) if num_chunks % n == 0)
        pairs = [(v, c) for v in range(self.together) for c in range(chunks)]
        last = B.Bind(self.tensors.positions[self.row + (self.count - 1)])
        with B.serial(num_chunks // chunks) as group, B.serial(self.num_parts) as part:
            first = B.Bind(part * self.together)
            sums = local_array(len(pairs) * width)

            def at(v: int, c: int) -> Any:
                return ramp((v * chunks + c) * width, width)

            for v, c in pairs:
                B.buffer_store(sums, constant(0.0, width), [at(v, c)])
            with B.serial(count) as p:
                number = self._page_number(self.sequence, page + p)
                if following is not None:
                    next_page = T.min(following.first + p, following.last)
                    next_number = self._page_number(following.sequence, next_page)
                    num_keys: Any = LANES
                else:
                    num_keys = B.Bind(T.min(last - (page + p) * LANES + 1, LANES))
                with B.serial((num_keys + 1) // 2) as step:
                    for t in (step * 2, step * 2 + 1):
                        start = t * head_dim + group * (chunks * width)
                        if following is not None:
                            for c in range(0, chunks, 2):
                                self._prefetch(next_number, following.head, start + c * width)
                        values = [self._value(number, start + c * width) for c in range(chunks)]
                        for v in range(self.together):
                            score = self.scores[((first + v) * BLOCK_PAGES + p) * LANES + t]
                            weight = splat(score, width)
                            weight = weight if chunks == 1 else B.Bind(weight)
                            for c, value in enumerate(values):
                                new = fma(weight, value, sums[at(v, c)], width)
                                B.buffer_store(sums, new, [at(v, c)])
            for v, c in pairs:
                own, block = self.own_factors[first + v], self.block_factors[first + v]
                state.merge_sums(first + v, group * chunks + c, sums[at(v, c)], own, block)

    def _prefetch(self, number: Any, head: Any, element: Any) -> None:
        tensors = self.tensors
        address = T.address_of(tensors.pages[tensors.layer, number, head, element])
        read, to_l1, data = T.int32(0), T.int32(3), T.int32(1)
        B.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", address, read, to_l1, data))

    def _value(self, number: Any, element: Any) -> Any:
        width, tensors = self.heads.width, self.tensors
        head = self.heads.num_kv_heads + self.head
        stored = tensors.pages[tensors.layer, number, head, ramp(element, width)]
        return B.Bind(T.Cast(dtype_of("float32", width), stored))
