from dataclasses import replace

import numpy as np
import pytest
from everycast.artifact.errors import CompileError
from everycast.schedules.gpu.attention import attention, splits_shape, tiling
from everycast.schedules.gpu.attention_block import AttentionShape
from everycast.schedules.gpu.limits import GemmTile, GpuLimits
from everycast.schedules.gpu.rotary import rotate_and_append

PAGE, LAYERS, LAYER = 16, 2, 1
SEQUENCES = ((0, 1), (5, 1), (0, 33), (17, 20), (40, 3), (63, 1))
"""(tokens before, new tokens): decode steps and prefill chunks, on both sides of page borders."""
DECODE = ((0, 1), (15, 1), (16, 1), (40, 1))
LONG = ((600, 1), (5, 1), (526, 1), (0, 1), (111, 1))
"""A few decode steps, long contexts: pages are split among blocks, some of which get none."""

LEAST = GpuLimits(max_threads=128, shared_bytes=16 << 10, gemm_tiles=(GemmTile(32, 32, 32, 4, 4),))


class Batch:
    """A ragged batch over pages in random order, and what every operator should make of it."""

    def __init__(self, shape, rotary_dim, rng, sequences=SEQUENCES):
        self.shape, self.rotary_dim = shape, rotary_dim
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.past = [past for past, _ in sequences]
        self.counts = [count for _, count in sequences]
        self.ids = np.repeat(np.arange(len(sequences)), self.counts)
        starts = np.cumsum([0, *self.counts[:-1]])
        within = np.arange(len(self.ids)) - starts[self.ids]
        self.keys = (np.array(self.past)[self.ids] + within).astype("int32")
        self.positions = self.keys
        self.starts = starts
        num_blocks = [-(-(past + count) // PAGE) for past, count in sequences]
        num_pages = sum(num_blocks) + 3
        free = iter(rng.permutation(num_pages))
        self.tables = np.zeros((len(sequences), max(num_blocks) + 1), "int32")
        for s, (past, count) in enumerate(sequences):
            for block in range(-(-(past + count) // PAGE)):
                self.tables[s, block] = next(free)
        m = len(self.ids)
        self.q = rng.standard_normal((m, heads * dim)).astype("float32")
        self.k, self.v = rng.standard_normal((2, m, kv_heads * dim)).astype("float32")
        self.rotary = rng.standard_normal((m, rotary_dim)).astype("float32")
        page_shape = (LAYERS, num_pages, 2 * kv_heads, PAGE * dim)
        self.pages = rng.standard_normal(page_shape).astype(shape.kv_dtype)
        page = self.tables[self.ids, self.keys // PAGE]
        self.slots = (page * PAGE + self.keys % PAGE).astype("int32")

    def rotated(self, x, heads):
        x = x.reshape(len(x), heads, -1).astype(float)
        half = self.rotary_dim // 2
        cos, sin = self.rotary[:, None, :half], self.rotary[:, None, half:]
        low, high = x[..., :half], x[..., half : 2 * half]
        rest = x[..., 2 * half :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)

    def appended(self):
        """The pages after the append."""
        shape, pages = self.shape, self.pages.copy()
        keys = self.rotated(self.k, shape.num_kv_heads)
        for i, slot in enumerate(self.slots):
            key, value = self.views(pages, slot // PAGE)
            key[:, :, slot % PAGE] = keys[i]
            value[:, slot % PAGE] = self.v[i].reshape(shape.num_kv_heads, -1)
        return pages

    def views(self, pages, page):
        """A page's keys [heads, D, page size] and values [heads, page size, D]."""
        shape = self.shape
        whole = pages[LAYER, page]
        keys = whole[: shape.num_kv_heads].reshape(-1, shape.head_dim, PAGE)
        return keys, whole[shape.num_kv_heads :].reshape(-1, PAGE, shape.head_dim)

    def tiles(self, tile):
        rows = [
            (s, self.starts[s] + i, min(tile, count - i))
            for s, count in enumerate(self.counts)
            for i in range(0, count, tile)
        ]
        return np.array(rows, "int32")

    def seen(self, i, window):
        """The keys that token i attends to."""
        position = self.positions[i]
        return np.arange(0 if window is None else max(0, position - window + 1), position + 1)

    def attended(self, q, pages, scale, window, softcap):
        shape = self.shape
        out = np.zeros((len(self.ids), shape.num_heads, shape.head_dim))
        for i, s in enumerate(self.ids):
            views = [self.views(pages, page) for page in self.tables[s]]
            keys = np.concatenate([key for key, _ in views], axis=2).astype(float)
            values = np.concatenate([value for _, value in views], axis=1).astype(float)
            seen = self.seen(i, window)
            for head in range(shape.num_heads):
                h = head // shape.group
                scores = q[i, head] @ keys[h][:, seen] * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[i, head] = weights / weights.sum() @ values[h, seen]
        return out


class TreeBatch(Batch):
    """`trees` has, for each sequence, the parent of each new token among these, -1 at a root; None
    where they follow each other."""

    def __init__(self, shape, rng, past, trees, num_words):
        counts = [5 if parents is None else len(parents) for parents in trees]
        super().__init__(shape, 0, rng, [*zip(past, counts, strict=True)])
        self.positions = self.keys.copy()
        self.ancestors = rng.integers(-(2**31), 2**31, (len(self.ids), num_words)).astype("int32")
        self.trees = np.zeros((len(past), 3), "int32")
        self.is_ancestor = {}
        for s, (parents, start) in enumerate(zip(trees, self.starts, strict=True)):
            if parents is None:
                self.trees[s] = 2**30, 0, 0
                continue
            self.trees[s] = past[s], start, len(parents)
            seen = np.zeros((len(parents), 32 * num_words), bool)
            for i, parent in enumerate(parents):
                if parent >= 0:
                    seen[i] = seen[parent]
                seen[i, i] = True
                self.positions[start + i] = past[s] + seen[i].sum() - 1
                words = np.packbits(seen[i], bitorder="little").view("int32")
                self.ancestors[start + i] = words
            self.is_ancestor[s] = seen

    def seen(self, i, window):
        s = self.ids[i]
        if s not in self.is_ancestor:
            return super().seen(i, window)
        context, start, count = self.trees[s]
        keys = np.concatenate(
            [np.arange(context), context + np.flatnonzero(self.is_ancestor[s][i - start])]
        )
        positions = np.append(np.arange(context), self.positions[start : start + count])
        return keys if window is None else keys[self.positions[i] - positions[keys] < window]


def attend(gpu, batch, q, pages, scale, window, softcap=None):
    """(what the kernel gives, what it should give), [m, heads, D]."""
    has_trees = isinstance(batch, TreeBatch)
    tiles = batch.tiles(tiling(batch.shape, gpu.limits).tokens)
    parts = np.full(splits_shape(batch.shape, gpu.limits), np.nan, "float32")
    inputs = [q, pages, batch.tables, batch.positions, tiles]
    if has_trees:
        inputs += [batch.trees, batch.ancestors]
    func = attention(batch.shape, scale, window, gpu.limits, softcap=softcap, has_trees=has_trees)
    *_, out, _ = gpu.run(func, *inputs, LAYER, np.full_like(q, np.nan), parts)
    heads = (len(q), batch.shape.num_heads, batch.shape.head_dim)
    return out.reshape(heads), batch.attended(q.reshape(heads), pages, scale, window, softcap)


def skip_unless_it_fits(gpu, shape):
    if 4 * PAGE * shape.head_dim >= gpu.limits.shared_bytes:
        pytest.skip("keys of a page do not fit in the shared memory of these limits")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim", "dtype", "window"),
    [
        (9, 3, 64, 64, "float16", None),
        (6, 3, 12, 12, "float32", 7),
        (8, 8, 80, 40, "float32", None),
        (16, 1, 32, 32, "float32", 16),
        (4, 2, 128, 128, "float16", 33),
        (4, 1, 256, 256, "float16", 20),
    ],
)
def test_append_and_attention(gpu, heads, kv_heads, dim, rotary_dim, dtype, window):
    shape = AttentionShape(heads, kv_heads, dim, PAGE, dtype)
    skip_unless_it_fits(gpu, shape)
    batch = Batch(shape, rotary_dim, gpu.rng)
    append = rotate_and_append(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rotary_dim=rotary_dim,
        page_size=PAGE, kv_dtype=dtype, limits=gpu.limits,
    )  # fmt: skip
    inputs = (batch.q, batch.k, batch.v, batch.rotary, batch.slots, batch.pages)
    *_, pages, _, q = gpu.run(append, *inputs, LAYER, np.zeros_like(batch.q))
    expected_q = batch.rotated(batch.q, heads)
    np.testing.assert_allclose(q.reshape(expected_q.shape), expected_q, atol=1e-5)
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    appended = batch.appended().astype("float32")
    np.testing.assert_allclose(pages.astype("float32"), appended, atol=tolerance)
    out, expected = attend(gpu, batch, q, pages, dim**-0.5, window)
    np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("dim", [12, 64, 100])
def test_decode_steps(gpu, dim):
    batch = Batch(AttentionShape(6, 2, dim, PAGE, "float16"), 0, gpu.rng, DECODE)
    out, expected = attend(gpu, batch, batch.q, batch.pages, dim**-0.5, 17)
    np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("window", [None, 530])
def test_long_contexts_are_split(gpu, window):
    for shape in (
        AttentionShape(9, 3, 64, PAGE, "float16"),
        AttentionShape(4, 1, 40, PAGE, "float32"),
    ):
        batch = Batch(shape, 0, gpu.rng, LONG)
        out, expected = attend(gpu, batch, batch.q, batch.pages, shape.head_dim**-0.5, window)
        np.testing.assert_allclose(out, expected, atol=2e-5)


def test_large_scores_do_not_overflow(gpu):
    for sequences in (SEQUENCES, LONG):
        batch = Batch(AttentionShape(2, 1, 16, PAGE, "float32"), 16, gpu.rng, sequences)
        out, expected = attend(gpu, batch, batch.q * 1e4, batch.pages, 1.0, None)
        np.testing.assert_allclose(out, expected, atol=1e-3)


@pytest.mark.parametrize("window", [None, 19])
def test_scores_are_capped(gpu, window):
    for sequences in (SEQUENCES, LONG):
        batch = Batch(AttentionShape(6, 2, 24, PAGE, "float16"), 0, gpu.rng, sequences)
        for softcap, spread in ((50.0, 1.0), (3.0, 10.0), (30.0, 1e4)):
            out, expected = attend(gpu, batch, batch.q * spread, batch.pages, 0.2, window, softcap)
            np.testing.assert_allclose(out, expected, atol=1e-4)


CHAIN, STAR = (-1, 0, 1, 2, 3), (-1, -1, -1, -1)
MEDUSA = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 7)
"""By levels: the last token, and guesses at the next, the one after that, and so on."""


def random_tree(rng, size):
    """Parents come before their children, in no other order."""
    return (-1, *(int(rng.integers(-1, i)) for i in range(1, size)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "window", "softcap"),
    [
        (9, 3, 64, "float16", None, None),
        (6, 3, 12, "float32", 5, None),
        (4, 4, 40, "float32", None, 20.0),
        (8, 1, 32, "float16", 23, 30.0),
    ],
)
def test_trees(gpu, heads, kv_heads, dim, dtype, window, softcap):
    """Trees on both sides of page borders, of more tokens than a tile or a word has, among decode
    steps and a chunk of a prompt; then few tokens over long contexts."""
    shape = AttentionShape(heads, kv_heads, dim, PAGE, dtype)
    large = random_tree(gpu.rng, 45)
    for past, trees in (
        ((0, 7, 13, 30, 64, 3), (CHAIN, MEDUSA, STAR, large, None, (-1,))),
        ((601, 530), (MEDUSA, STAR)),
    ):
        batch = TreeBatch(shape, gpu.rng, past, trees, 2)
        out, expected = attend(gpu, batch, batch.q, batch.pages, dim**-0.5, window, softcap)
        np.testing.assert_allclose(out, expected, atol=2e-5)


def test_a_chain_is_a_tree_and_the_context_may_be_empty(gpu):
    shape = AttentionShape(6, 2, 20, PAGE, "float32")
    chain = TreeBatch(shape, gpu.rng, (0, 40), (CHAIN, CHAIN), 1)
    batch = Batch(shape, 0, np.random.default_rng(0), ((0, 5), (40, 5)))
    batch.tables = chain.tables
    for window in (None, 3):
        ours, _ = attend(gpu, chain, chain.q, chain.pages, 0.3, window)
        theirs, _ = attend(gpu, batch, chain.q, chain.pages, 0.3, window)
        np.testing.assert_array_equal(ours, theirs)


def test_only_wide_heads_take_more_shared_memory():
    usual = replace(LEAST, shared_bytes=16 << 10)
    more = replace(usual, max_shared_bytes=32 << 10)
    assert tiling(AttentionShape(4, 1, 256, PAGE, "float16"), more).pages == 1
    narrow = AttentionShape(4, 1, 128, PAGE, "float16")
    assert tiling(narrow, more) == tiling(narrow, usual)


def test_tiling_fits_in_shared_memory():
    for heads, kv_heads, dim in ((9, 3, 64), (32, 8, 128), (71, 1, 64), (4, 1, 256), (32, 1, 128)):
        for kilobytes in (16, 32, 48):
            shape = AttentionShape(heads, kv_heads, dim, PAGE, "float16")
            limits = replace(LEAST, shared_bytes=kilobytes << 10)
            if 4 * PAGE * dim >= limits.shared_bytes:
                with pytest.raises(CompileError, match=f"head_dim {dim} needs"):
                    tiling(shape, limits)
                continue
            tile = tiling(shape, limits)
            assert shape.group % tile.heads == 0 and tile.tokens >= 1
            keys = tile.pages * PAGE
            used = 4 * (keys * dim + tile.rows * (dim + keys + 3))
            assert used <= limits.shared_bytes and tile.rows <= limits.attention_rows
