"""Attention over KV pages, for ragged batches of prefill chunks and decode steps.

A few decode steps over long contexts are too little work for a GPU by heads alone: then the pages
of a sequence are split among blocks, and a second kernel merges what they found (Flash-Decoding,
Dao et al., 2023). The host chooses. See `attention_block` for what a block does.
"""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ...artifact.errors import CompileError
from .attention_block import LEAST, AttentionBlock, AttentionShape, Tensors, Tiling
from .attention_mask import CausalMask, Mask, TreeMask
from .kernel import (
    bind,
    body,
    either,
    elements,
    floor_div,
    floor_mod,
    kernel,
    kernel_factory,
    launch,
    store,
    when,
)
from .limits import GpuLimits

_SPLIT_TOKENS, _SPLIT_BLOCKS = 16, 32
"""Contexts are split for at most so many tokens in a batch, from so many pages on."""


def tiling(shape: AttentionShape, limits: GpuLimits) -> Tiling:
    """As many rows as shared memory takes, up to the limit: all heads of a group before tokens.

    CompileError where not even one row fits.
    """
    page_bytes = _shared_bytes(shape, 0, 1)
    row_bytes = _shared_bytes(shape, 1, 1) - page_bytes
    shared_bytes = _budget(shape, limits)
    most = min((shared_bytes - page_bytes) // row_bytes, limits.attention_rows)
    if most < 1:
        raise CompileError(
            f"attention with head_dim {shape.head_dim} needs {page_bytes + row_bytes} bytes of "
            f"shared memory, the target has {shared_bytes}; choose another target"
        )
    heads = max(h for h in range(1, shape.group + 1) if shape.group % h == 0 and h <= most)
    return _with_pages(shape, most // heads, heads, limits)


def _with_pages(shape: AttentionShape, tokens: int, heads: int, limits: GpuLimits) -> Tiling:
    """As many pages at a time as there is shared memory for, up to four."""
    budget = _budget(shape, limits)
    fitting = (n for n in (4, 2, 1) if _shared_bytes(shape, tokens * heads, n) <= budget)
    return Tiling(tokens, heads, next(fitting))


def _budget(shape: AttentionShape, limits: GpuLimits) -> int:
    """Bytes of shared memory: more than usual only where not even one row fits."""
    if _shared_bytes(shape, 1, 1) <= limits.shared_bytes:
        return limits.shared_bytes
    return limits.max_shared_bytes or limits.shared_bytes


def _shared_bytes(shape: AttentionShape, rows: int, pages: int) -> int:
    """What `AttentionBlock` takes: keys or values, and for each row its query, its scores and
    three numbers."""
    keys = pages * shape.page_size
    return 4 * (keys * shape.head_dim + rows * (shape.head_dim + keys + 3))


def splits_shape(shape: AttentionShape, limits: GpuLimits) -> tuple[int, int]:
    """Of the buffer in which blocks leave what they found: a row for each token, head and split
    holds the largest score, the sum of weights, and the weighted sum of values."""
    rows = _SPLIT_TOKENS * shape.num_heads * limits.attention_splits
    return rows, shape.head_dim + 2


@kernel_factory
def attention(
    shape: AttentionShape,
    scale: float,
    window: int | None,
    limits: GpuLimits,
    *,
    softcap: float | None = None,
    has_trees: bool = False,
) -> tirx.PrimFunc:
    """(q [m, heads · D], pages, tables [b, w], positions [m], tiles [t, 3], with trees also trees
    [b, 3] and ancestors [m, words], layer) → (out like q, a workspace of `splits_shape`).

    The operator of the same name (`relax_models/operators.py`); a tile has at most as many tokens
    as `tiling` says. With `has_trees` the new tokens of a sequence may be a tree of guesses, as
    speculative decoding verifies them: see `TreeMask`.
    """
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    name = f"attention_{heads}_{kv_heads}_{dim}{'_window' if window else ''}"
    with kernel(name + ("_tree" if has_trees else "")) as (k, ib):
        q = k.buffer("q", ("num_tokens", heads * dim), "float32")
        page_shape = ("num_layers", "num_pages", 2 * kv_heads, shape.page_size * dim)
        pages = k.buffer("pages", page_shape, shape.kv_dtype, size_dtype="int64")
        tables = k.buffer("tables", ("num_sequences", "num_blocks"), "int32")
        positions = k.buffer("positions", ("num_tokens",), "int32")
        tiles = k.buffer("tiles", ("num_tiles", 3), "int32")
        mask: Mask = CausalMask(positions, window)
        if has_trees:
            trees = k.buffer("trees", ("num_sequences", 3), "int32")
            ancestors = k.buffer("ancestors", ("num_tokens", "num_words"), "int32")
            mask = TreeMask(positions, window, trees, ancestors, k.size("num_words"))
        layer = k.scalar("layer")
        out = k.buffer("out", ("num_tokens", heads * dim), "float32")
        parts = k.buffer("parts", splits_shape(shape, limits), "float32")
        tensors = Tensors(q, pages, tables, tiles, layer)
        own, threads = tiling(shape, limits), limits.attention_threads
        # Decode steps have one token a tile: fewer rows, fewer registers.
        single = _with_pages(shape, 1, own.heads, limits)
        num_tokens, num_tiles = k.size("num_tokens"), k.size("num_tiles")
        blocks, splits = [num_tiles, heads // own.heads], limits.attention_splits

        def whole(of: Tiling) -> None:
            with launch(blocks, [threads]) as ((tile, part), (thread,)):
                block = AttentionBlock(
                    shape, of, tensors, mask, tile=tile, part=part, thread=thread, threads=threads
                )
                block.emit(scale, softcap)
                for row, d, token, head, value in block.results():
                    store(out, value / block.total[row], token, head * dim + d)

        def split(of: Tiling) -> None:
            # Two dimensions: WebGPU keeps the third for itself.
            with launch([num_tiles, blocks[1] * splits], [threads]) as ((tile, at), (thread,)):
                part, index = bind(floor_div(at, splits)), bind(floor_mod(at, splits))
                block = AttentionBlock(
                    shape, of, tensors, mask, tile=tile, part=part, thread=thread, threads=threads
                )
                block.emit(scale, softcap, (index, splits))
                for row, d, token, head, value in block.results():
                    at = bind((token * heads + head) * splits + index)
                    store(parts, value, at, d + 2)
                    with when(d == 0):
                        store(parts, block.largest[row], at, 0)
                        store(parts, block.total[row], at, 1)
            _merge(num_tokens * heads, shape, limits, parts, out)

        def few(of: Tiling) -> None:
            """Few rows: over long contexts the pages are split."""
            if splits == 1 or (window is not None and window // shape.page_size < _SPLIT_BLOCKS):
                whole(of)
                return
            is_long = k.size("num_blocks") >= _SPLIT_BLOCKS
            is_little = num_tokens <= _SPLIT_TOKENS
            either(T.And(is_little, is_long), lambda: split(of), lambda: whole(of))

        with body():
            if own.tokens == 1:
                few(single)
            elif has_trees:
                few(own)
            else:
                either(num_tokens == num_tiles, lambda: few(single), lambda: whole(own))
    return ib.get()


def _merge(num_rows: Any, shape: AttentionShape, limits: GpuLimits, parts: Any, out: Any) -> None:
    """The splits of each token and head put together. A thread for each element of out."""
    dim, splits = shape.head_dim, limits.attention_splits
    with elements(num_rows * dim, min(limits.max_threads, 256)) as at:
        row, d = bind(floor_div(at, dim)), bind(floor_mod(at, dim))
        first = bind(row * splits)
        largest = T.float32(LEAST)
        for i in range(splits):
            largest = T.max(largest, parts[first + i, 0])
        largest = bind(largest)
        factors = [bind(T.exp2(parts[first + i, 0] - largest)) for i in range(splits)]
        total, value = T.float32(0), T.float32(0)
        for i, factor in enumerate(factors):
            total = total + factor * parts[first + i, 1]
            value = value + factor * parts[first + i, d + 2]
        token, head = floor_div(row, shape.num_heads), floor_mod(row, shape.num_heads)
        store(out, value / total, token, head * dim + d)
