"""Attention over KV pages: which thread works on which rows and keys.

One unit of work is a (query tile, split, key head) triple, in that order: neighbours read
neighbouring pages, and each asks for the keys that the next one begins with.

Keys come in blocks that start at multiples of their size; split s of S has the blocks s, s + S, …
Each split is reduced on its own (`attention_keys`), then the splits are merged in order
(`attention_state`): a row's result is the same, to the last bit, in a tile and alone, whatever the
batch and the number of threads.

Tiles of several rows are many: one unit does all of a tile's splits. A tile of a single row, which
is what a decoding sequence has, is a unit for each split if it sees more than one block; these
leave their parts in a workspace, and `merge_splits` makes the row of them.
"""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .attention_keys import (
    BLOCK_PAGES,
    Blocks,
    KeyPages,
    Rows,
    Tensors,
    blocks_of,
    choose_pages,
)
from .attention_state import Heads, State, StoredParts, stored_size
from .control import either, parallel
from .isa import CpuIsa
from .kernel import body, kernel, kernel_factory
from .vectors import LANES, ramp, splat

_TILE_VECTORS = 24
"""Query vectors of a tile, rows times heads of a group: what is kept of them fits into the L1 cache
beside a page, and more share no work that counts."""
_SPLITS_OF_ALL_HEADS = 32
_MAX_SPLITS = 16


def query_tile(heads: Heads) -> int:
    """Rows of a full query tile.

    At least 2, so that no sequence has two tiles of a single row in a batch.
    """
    return max(2, _TILE_VECTORS // heads.group)


def num_splits(heads: Heads) -> int:
    """Splits of a context, a power of two: a single row alone should keep many threads busy."""
    wanted = min(_MAX_SPLITS, max(1, _SPLITS_OF_ALL_HEADS // heads.num_kv_heads))
    return 1 << (wanted.bit_length() - 1)


def splits_shape(num_sequences: Any, heads: Heads) -> tuple[Any, int]:
    """Shape of the workspace, float32: the state of one row for each split."""
    return num_sequences, num_splits(heads) * heads.num_heads * stored_size(heads)


@kernel_factory
def attention(
    *, heads: Heads, page_size: int, kv_dtype: str, scale: float, window: int | None, isa: CpuIsa
) -> tirx.PrimFunc:
    """The operator of the same name (`relax_models/operators.py`), without the rows that
    `merge_splits` completes. The workspace is a second result.

    Tiles have up to `query_tile` rows. A sequence may have one tile of a single row.
    """
    if page_size != LANES:
        raise ValueError(f"page size {page_size}: these kernels need {LANES} tokens a page")
    splits, tile_rows = num_splits(heads), query_tile(heads)
    with kernel(f"attention_{heads}_{window or 'full'}") as (k, ib):
        q_shape = ("num_tokens", heads.num_heads * heads.head_dim)
        q = k.buffer("q", q_shape, "float32")
        page_shape = ("num_layers", "num_pages", 2 * heads.num_kv_heads, page_size * heads.head_dim)
        pages = k.buffer("pages", page_shape, kv_dtype)
        tables = k.buffer("block_tables", ("num_sequences", "num_blocks"), "int32")
        positions = k.buffer("positions", ("num_tokens",), "int32")
        tiles = k.buffer("query_tiles", ("num_tiles", 3), "int32")
        tensors = Tensors(q, pages, tables, positions, k.scalar("layer"))
        out = k.buffer("out", q_shape, "float32")
        workspace = k.buffer("workspace", splits_shape("num_sequences", heads), "float32")
        parts = StoredParts(workspace, heads)
        with body(), parallel(k.size("num_tiles") * (heads.num_kv_heads * splits)) as unit:
            tile = B.Bind(unit // (heads.num_kv_heads * splits))
            split = B.Bind(T.Cast("int32", unit // heads.num_kv_heads % splits))
            head = B.Bind(unit % heads.num_kv_heads)
            sequence, first, count = (B.Bind(tiles[tile, i]) for i in range(3))

            def upcoming_keys(blocks: Blocks, number: Any) -> KeyPages:
                """What follows a split of a single row: the next key head, else the next split,
                else the next tile."""
                last = blocks.end_page - 1

                def first_of(split: Any) -> tuple[Any, Any]:
                    block, num = _blocks_of_split(blocks, split, splits)
                    return T.max(block * BLOCK_PAGES, blocks.first_page), num

                after = B.Bind(number + 1)
                (own, _), (following, num) = first_of(number), first_of(after)
                other = B.Bind(T.min(tile + 1, k.size("num_tiles") - 1))
                pages = blocks_of(positions, tiles[other, 1], 1, window)
                there = KeyPages(tiles[other, 0], T.int64(0), pages.first_page, pages.end_page - 1)
                behind = KeyPages(sequence, T.int64(0), following, last)
                leaves = choose_pages(T.And(after < splits, num > 0), behind, there)
                beside = KeyPages(sequence, head + 1, own, last)
                return choose_pages(head + 1 < heads.num_kv_heads, beside, leaves)

            def rows_of(num_rows: int) -> Rows:
                return Rows(
                    tensors, heads, scale, window, rows=num_rows, isa=isa,
                    sequence=sequence, head=head, row=first, count=count if num_rows > 1 else 1,
                )  # fmt: skip

            def emit_row() -> None:
                blocks = blocks_of(positions, first, 1, window)
                in_splits = B.Bind(blocks.end - blocks.first > 1)
                start, num = _blocks_of_split(blocks, split, splits)
                with B.If(num > 0), B.Then():
                    rows = rows_of(1)
                    state = State(heads, rows.num_vectors)
                    state.clear()
                    upcoming = upcoming_keys(blocks, split)
                    with B.serial(num) as i:
                        block = B.Bind(start + i * splits)
                        own_first = (block + splits) * BLOCK_PAGES
                        own = KeyPages(sequence, head, own_first, blocks.end_page - 1)
                        following = choose_pages(i == num - 1, upcoming, own)
                        rows.add_block(state, blocks, block, following)
                    with either(in_splits) as (partly, whole):
                        with partly:
                            parts.save(state, sequence, split, head)
                        with whole:
                            rows.write(out, state)

            def emit_rows() -> None:
                blocks = blocks_of(positions, first, count, window)
                rows = rows_of(tile_rows)
                states = State(heads, rows.num_vectors, num_places=2)
                whole, part = states.place(0), states.place(1)
                whole.clear()
                with B.serial(splits) as number:
                    start, num = _blocks_of_split(blocks, T.Cast("int32", number), splits)
                    with B.If(num > 1), B.Then():
                        part.clear()
                    with B.serial(num) as i:
                        place = T.if_then_else(num > 1, T.int32(1), T.int32(0))
                        rows.add_block(states.place(place), blocks, B.Bind(start + i * splits))
                    with B.If(num > 1), B.Then():
                        whole.merge(part)
                rows.write(out, whole)

            with either(count > 1) as (several, single):
                with several, B.If(split == 0), B.Then():
                    emit_rows()
                with single:
                    emit_row()
    return ib.get()


@kernel_factory
def merge_splits(*, heads: Heads, window: int | None) -> tirx.PrimFunc:
    """(positions, query_tiles, workspace, out) → the rows that are missing in out."""
    with kernel(f"merge_splits_{heads}_{window or 'full'}") as (k, ib):
        positions = k.buffer("positions", ("num_tokens",), "int32")
        tiles = k.buffer("query_tiles", ("num_tiles", 3), "int32")
        workspace = k.buffer("workspace", splits_shape("num_sequences", heads), "float32")
        parts = StoredParts(workspace, heads)
        out = k.buffer("out", ("num_tokens", heads.num_heads * heads.head_dim), "float32")
        with body(), parallel(k.size("num_tiles") * heads.num_heads) as unit:
            tile, head = B.Bind(unit // heads.num_heads), B.Bind(unit % heads.num_heads)
            sequence, row, count = (B.Bind(tiles[tile, i]) for i in range(3))
            blocks = blocks_of(positions, row, 1, window)
            with B.If(_is_split(count, blocks)), B.Then():
                state = State(heads, 1)
                state.clear()
                with B.serial(num_splits(heads)) as i:
                    split = B.Bind(T.Cast("int32", i))
                    _, own = _blocks_of_split(blocks, split, num_splits(heads))
                    with B.If(own > 0), B.Then():
                        state.merge(parts.load(sequence, split, head))
                inverse = state.inverse(0)
                with B.serial(heads.num_chunks) as c:
                    at = ramp(head * heads.head_dim + c * heads.width, heads.width)
                    value = state.sums(0, c) * splat(inverse, heads.width)
                    B.buffer_store(out, value, [row, at])
    return ib.get()


def _blocks_of_split(blocks: Blocks, split: Any, splits: int) -> tuple[Any, Any]:
    """The first block of a split, and how many it has."""
    first = B.Bind(blocks.first + (split - blocks.first) % splits)
    return first, B.Bind((blocks.end - first + (splits - 1)) // splits)


def _is_split(count: Any, blocks: Blocks) -> Any:
    return T.And(count == 1, blocks.end - blocks.first > 1)
