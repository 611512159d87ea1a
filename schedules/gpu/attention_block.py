"""What a block of threads does in attention: FlashAttention's tiles over PagedAttention's pages.

    block: a tile of tokens of one sequence, with query heads of one key-value head: its rows
    loop over the pages that the tile sees, some at a time:
        scores [rows, keys] in shared memory, softmax online (a thread for each row), then
        out [rows, head_dim] in registers: each thread keeps the same elements throughout

After FlashAttention (Dao et al., 2022) and PagedAttention (Kwon et al., 2023).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .attention_mask import Mask, Tile
from .kernel import (
    barrier,
    bind,
    ceil_div,
    floor_div,
    floor_mod,
    load_vector,
    registers,
    share,
    shared,
    store,
    strided,
    vector_width,
    when,
)

LEAST = -3.0e38
"""Below every score; finite, so that differences of two of them are numbers."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constants of the attention of one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: str

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a block of threads attends with: `tokens` of a sequence, `heads` of the query heads
    that share a key-value head; and to: `pages` at a time."""

    tokens: int
    heads: int
    pages: int

    @property
    def rows(self) -> int:
        return self.tokens * self.heads


@dataclass(frozen=True, slots=True)
class Tensors:
    """Arguments of the operator, inside its kernel."""

    q: Any
    pages: Any
    tables: Any
    tiles: Any
    layer: Any


class AttentionBlock:
    """Emits what a block of threads does; made inside its launch."""

    def __init__(
        self,
        shape: AttentionShape,
        tiling: Tiling,
        tensors: Tensors,
        mask: Mask,
        *,
        tile: Any,
        part: Any,
        thread: Any,
        threads: int,
    ) -> None:
        """`part` counts blocks over the query heads, `thread` is one of `threads`."""
        self.shape, self.tensors, self.heads = shape, tensors, tiling.heads
        self.thread, self.threads = thread, threads
        self.first_head = bind(part * tiling.heads)
        self.kv_head = bind(floor_div(self.first_head, shape.group))
        self.mask, self.tile = mask, Tile(*(bind(tensors.tiles[tile, i]) for i in range(3)))
        self.num_rows = bind(self.tile.num_tokens * tiling.heads)
        dim = shape.head_dim
        self.pages, self.num_keys = tiling.pages, tiling.pages * shape.page_size
        self.queries = shared(tiling.rows * dim)
        self.page_tile = shared(self.num_keys * dim)
        self.scores = shared(tiling.rows * self.num_keys)
        self.largest = shared(tiling.rows)
        self.total = shared(tiling.rows)
        """Of each row: the largest score, and the sum of weights relative to it."""
        self.rescale = shared(tiling.rows)
        self.width = vector_width(math.gcd(dim, shape.page_size))
        self.by_key = _Shares(self.num_keys // self.width, tiling.rows, threads)
        self.by_element = _Shares(dim // self.width, tiling.rows, threads)
        self.dots = registers(self.by_key.num_own * self.width)
        self.sums = registers(self.by_element.num_own * self.width)

    def emit(
        self, scale: float, softcap: float | None, split: tuple[Any, int] | None = None
    ) -> None:
        """Scores are `scale` · q · k; with a softcap c, they become c · tanh(score / c). `split` is
        which of how many parts of the pages this block takes; None: all. Store what it found in a
        loop over `results`."""
        size = self.shape.page_size
        self._start(scale)
        first_key, last_key = self.mask.keys(self.tile)
        first_page = bind(floor_div(first_key, size))
        num_pages = bind(floor_div(last_key, size) + 1 - first_page)
        if split is not None:
            index, count = split
            each = bind(floor_div(num_pages + (count - 1), count))
            start = bind(T.min(index * each, num_pages))
            first_page = bind(first_page + start)
            num_pages = bind(T.min(each, num_pages - start))
        last_page = bind(first_page + num_pages - 1)
        with B.serial(ceil_div(num_pages, self.pages)) as turn:
            first = bind(first_page + turn * self.pages)
            # Beyond the last page, that one again: `_score` leaves its keys out.
            blocks = [bind(T.min(first + i, last_page)) if i else first for i in range(self.pages)]
            tables = self.tensors.tables
            pages = [bind(T.Cast("int64", tables[self.tile.sequence, block])) for block in blocks]
            barrier()  # the values before are no longer read
            self._load(pages, self.kv_head)
            barrier()
            self._score(bind(first * size), bind((last_page + 1) * size), softcap)
            barrier()
            self._load(pages, self.kv_head + self.shape.num_kv_heads)
            with share(self.num_rows, self.thread, self.threads) as row:
                self._weigh(row)
            barrier()
            self._add_values()
        barrier()  # where there was no page, the first one

    def results(self) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
        """Emits the loop's body for each element of a thread: (row, element of the head, token,
        query head, weighted sum of values)."""
        for i, row, column in self.by_element.own(self.thread, self.num_rows):
            token = bind(self._token(row))
            head = bind(self.first_head + floor_mod(row, self.heads))
            for v in range(self.width):
                d = bind(column * self.width + v)
                yield row, d, token, head, self.sums[i * self.width + v]

    def _token(self, row: Any) -> Any:
        return self.tile.first_token + floor_div(row, self.heads)

    def _start(self, scale: float) -> None:
        """Scaled queries into shared memory; nothing seen yet."""
        dim = self.shape.head_dim
        factor = T.float32(scale * math.log2(math.e))
        with share(self.num_rows * dim, self.thread, self.threads) as at:
            row, d = bind(floor_div(at, dim)), bind(floor_mod(at, dim))
            column = (self.first_head + floor_mod(row, self.heads)) * dim + d
            store(self.queries, self.tensors.q[self._token(row), column] * factor, at)
        with share(self.num_rows, self.thread, self.threads) as row:
            store(self.largest, T.float32(LEAST), row)
            store(self.total, T.float32(0), row)
        for i in range(self.by_element.num_own * self.width):
            store(self.sums, T.float32(0), i)

    def _load(self, pages: Sequence[Any], head: Any) -> None:
        """Keys or values of pages into shared memory, as float32 and in the same order."""
        layer, width = self.tensors.layer, self.width
        count = self.shape.page_size * self.shape.head_dim
        dtype = f"float32x{width}" if width > 1 else "float32"
        for i, page in enumerate(pages):
            for vector in strided(count // width, self.thread, self.threads):
                start = vector * width
                at = T.ramp(start, 1, width) if width > 1 else start
                to = T.ramp(i * count + start, 1, width) if width > 1 else i * count + start
                store(self.page_tile, T.Cast(dtype, self.tensors.pages[layer, page, head, at]), to)

    def _score(self, first_key: Any, end: Any, softcap: float | None) -> None:
        """Scores of every row with every key of the pages, of which those from `end` on are not
        there; those not seen are the least."""
        dim, size, width = self.shape.head_dim, self.shape.page_size, self.width
        for i in range(self.by_key.num_own * width):
            store(self.dots, T.float32(0), i)
        with B.serial(dim) as d:
            for column in self.by_key.columns(self.thread):
                page = floor_div(column.index, size // width)
                in_page = floor_mod(column.index, size // width)
                start = (page * dim + d) * size + in_page * width
                keys = load_vector(self.page_tile, (), start, width)
                for i, row in column.rows(self.num_rows):
                    query = bind(self.queries[row * dim + d])
                    for v, key in enumerate(keys):
                        at = i * width + v
                        store(self.dots, self.dots[at] + query * key, at)
        for i, row, column in self.by_key.own(self.thread, self.num_rows):
            sees = self.mask.seen_by(bind(self._token(row)), self.tile)
            for v in range(width):
                t = bind(column * width + v)
                key = bind(first_key + t)
                is_seen = sees(key)
                if self.pages > 1:
                    is_seen = T.And(is_seen, key < end)
                score = self.dots[i * width + v]
                if softcap is not None:
                    score = _capped(bind(score), softcap * math.log2(math.e))
                score = T.Select(is_seen, score, T.float32(LEAST))
                store(self.scores, score, row * self.num_keys + t)

    def _weigh(self, row: Any) -> None:
        """Scores of a row → weights relative to its largest score so far."""
        count, scores = self.num_keys, self.scores
        new = registers(1)
        store(new, self.largest[row], 0)
        with B.serial(count) as t:
            store(new, T.max(new[0], scores[row * count + t]), 0)
        new = bind(new[0])
        # A row that has seen nothing yet has weights of 0, not of exp2(0).
        base = bind(T.Select(new == T.float32(LEAST), T.float32(0), new))
        factor = bind(T.exp2(self.largest[row] - base))
        added = registers(1)
        store(added, T.float32(0), 0)
        with B.serial(count) as t:
            weight = bind(T.exp2(scores[row * count + t] - base))
            store(scores, weight, row * count + t)
            store(added, added[0] + weight, 0)
        store(self.total, self.total[row] * factor + added[0], row)
        store(self.rescale, factor, row)
        store(self.largest, new, row)

    def _add_values(self) -> None:
        dim, width = self.shape.head_dim, self.width
        for i, row, _ in self.by_element.own(self.thread, self.num_rows):
            factor = bind(self.rescale[row])
            for v in range(width):
                store(self.sums, self.sums[i * width + v] * factor, i * width + v)
        with B.serial(self.num_keys) as t:
            for column in self.by_element.columns(self.thread):
                start = t * dim + column.index * width
                values = load_vector(self.page_tile, (), start, width)
                for i, row in column.rows(self.num_rows):
                    weight = bind(self.scores[row * self.num_keys + t])
                    for v, value in enumerate(values):
                        at = i * width + v
                        store(self.sums, self.sums[at] + weight * value, at)


def _capped(score: Any, cap: float) -> Any:
    """cap · tanh(score / cap), by tanh(x) = 1 - 2 / (e^2x + 1)."""
    exponent = bind(score * T.float32(2 * math.log2(math.e) / cap))
    # Beyond, tanh is 1: the exponential functions of GPUs need not give infinity.
    power = T.exp2(T.min(T.max(exponent, T.float32(-40)), T.float32(40)))
    return T.float32(cap) - T.float32(2 * cap) / (power + T.float32(1))


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that a thread has, in some rows."""

    index: Any
    team: Any
    teams: int
    first: int
    """Number of its first element among the thread's."""
    num_rows: int

    def rows(self, num_rows: Any) -> Iterator[tuple[int, Any]]:
        """Emits the loop's body for each row below `num_rows` of the thread: (number of the
        element among the thread's, row)."""
        for r in range(self.num_rows):
            row = bind(self.team + r * self.teams)
            with when(row < num_rows):
                yield self.first + r, row


@dataclass(frozen=True, slots=True)
class _Shares:
    """How the threads share a matrix [rows, width]: each has columns of its own, the same in every
    row that it has, so that what belongs to a column is read once."""

    width: int
    max_rows: int
    threads: int

    @property
    def teams(self) -> int:
        """Groups of threads, each with rows of its own."""
        return max(self.threads // self.width, 1)

    @property
    def rows_each(self) -> int:
        return -(-self.max_rows // self.teams)

    @property
    def columns_each(self) -> int:
        return -(-self.width // self.threads)

    @property
    def num_own(self) -> int:
        """Elements of a thread, at most."""
        return self.rows_each * self.columns_each

    def columns(self, thread: Any) -> Iterator[_Column]:
        """Emits the loop's body for each column of a thread."""
        for c in range(self.columns_each):
            if self.teams == 1:
                index, team = bind(thread + c * self.threads), T.int32(0)
                has_column = index < self.width
            else:
                index, team = (
                    bind(floor_mod(thread, self.width)),
                    bind(floor_div(thread, self.width)),
                )
                has_column = team < self.teams
            with when(has_column):
                yield _Column(index, team, self.teams, c * self.rows_each, self.rows_each)

    def own(self, thread: Any, num_rows: Any) -> Iterator[tuple[int, Any, Any]]:
        """Emits the loop's body for each element of a thread: (its number, row, column)."""
        for column in self.columns(thread):
            for i, row in column.rows(num_rows):
                yield i, row, column.index
