"""Paged attention, RoPE with append, and norms against plain NumPy, over odd shapes."""

import functools
import itertools
import math

import numpy as np
import pytest
import tvm
from everycast.relax_models import paged_attention as oracle
from everycast.schedules.cpu import attention as kernels
from everycast.schedules.cpu import norm, rotary
from everycast.schedules.cpu.attention_keys import BLOCK_PAGES, max_loaded, parts_of
from everycast.schedules.cpu.attention_state import Heads
from everycast.schedules.cpu.isa import isa_of
from everycast.schedules.pipeline import CPU_TIR_PIPELINE

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
AVX512 = tvm.target.Target({"kind": "llvm", "mcpu": "icelake-server"})
PAGE = 16


@functools.cache
def build(func, target=TARGET):
    name = str(func.attrs["global_symbol"]) if "global_symbol" in func.attrs else "kernel"
    module = tvm.IRModule({name: func.with_attr("global_symbol", name)})
    return tvm.compile(module, target=target, tir_pipeline=CPU_TIR_PIPELINE)[name]


class Attention:
    """The kernels of one layer, compiled."""

    def __init__(self, shape, window, dtype="float16", target=TARGET, scale=None):
        self.heads, self.isa = Heads(*shape), isa_of(target)
        self.scale = self.heads.head_dim**-0.5 if scale is None else scale
        self.window = window
        constants = dict(page_size=PAGE, kv_dtype=dtype, scale=self.scale, window=window)
        self.partly = build(kernels.attention(heads=self.heads, isa=self.isa, **constants), target)
        self.merge = build(kernels.merge_splits(heads=self.heads, window=window), target)
        self.tile = kernels.query_tile(self.heads)

    def __call__(self, case, tiles, rows=slice(None)):
        """`rows` of the case's output, float32."""
        tiles = tiles - np.array([0, rows.start or 0, 0], "int32")
        q, positions = tensor(case.q[rows]), tensor(case.positions[rows])
        out = tensor(np.full_like(case.q[rows], np.nan))
        shape = kernels.splits_shape(len(case.tables), self.heads)
        workspace = tensor(np.full(shape, np.nan, "float32"))
        tables, pages = tensor(case.tables), tensor(case.pages)
        self.partly(q, pages, tables, positions, tensor(tiles), 1, out, workspace)
        self.merge(positions, tensor(tiles), workspace, out)
        return out.numpy()

    def alone(self, case):
        """Every row in a call of its own."""
        return np.concatenate(
            [self(case, tile[None], slice(tile[1], tile[1] + 1)) for tile in case.tiles(1)]
        )


def tensor(array):
    return tvm.runtime.tensor(np.ascontiguousarray(array))


class Case:
    """A ragged batch with random contents: past lengths and new lengths of each sequence."""

    def __init__(self, heads, kv_heads, head_dim, dtype, lengths, seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.lengths = lengths
        m = sum(new for _, new in lengths)
        blocks = [-(-(past + new) // PAGE) for past, new in lengths]
        numbers = rng.permutation(sum(blocks) + 3)
        self.tables = np.zeros((len(lengths), max(blocks)), "int32")
        start = 0
        for row, count in enumerate(blocks):
            self.tables[row, :count] = numbers[start : start + count]
            start += count
        # Unused slots hold 7: a kernel that lets them through shows it.
        self.pages = np.full((2, len(numbers), 2 * kv_heads, PAGE * head_dim), 7.0, dtype)
        self.q = rng.standard_normal((m, heads * head_dim)).astype("float32")
        self.positions = np.concatenate(
            [np.arange(past, past + new) for past, new in lengths]
        ).astype("int32")
        self.keys, self.values = [], []
        for row, (past, new) in enumerate(lengths):
            k = rng.standard_normal((past + new, kv_heads, head_dim)).astype(dtype)
            v = rng.standard_normal((past + new, kv_heads, head_dim)).astype(dtype)
            self.keys.append(k)
            self.values.append(v)
            for j in range(past + new):
                page = self.pages[1, self.tables[row, j // PAGE]]
                for h in range(kv_heads):
                    page[h, np.arange(head_dim) * PAGE + j % PAGE] = k[j, h]
                    page[kv_heads + h, (j % PAGE) * head_dim :][:head_dim] = v[j, h]

    def tiles(self, size, offset=0):
        """Tiles of `size` rows; with an offset, each sequence begins with a tile of `offset`."""
        rows, first = [], 0
        for sequence, (_, new) in enumerate(self.lengths):
            edges = sorted({0, *range(offset, new, size), new})
            for start, stop in itertools.pairwise(edges):
                rows.append((sequence, first + start, stop - start))
            first += new
        return np.array(rows, "int32")

    def expected(self, scale, window):
        out, row = np.zeros_like(self.q), 0
        group = self.heads // self.kv_heads
        for k, v, (past, new) in zip(self.keys, self.values, self.lengths, strict=True):
            for i in range(past, past + new):
                first = 0 if window is None else max(0, i - window + 1)
                for h in range(self.heads):
                    at = slice(h * self.head_dim, (h + 1) * self.head_dim)
                    scores = k[first : i + 1, h // group].astype("float64") @ self.q[row, at]
                    scores = np.exp((scores - scores.max()) * scale)
                    weights = scores / scores.sum()
                    out[row, at] = weights @ v[first : i + 1, h // group].astype("float64")
                row += 1
        return out


SHAPES = [(9, 3, 64), (4, 1, 256), (14, 2, 64), (4, 4, 8), (8, 2, 80), (2, 1, 128), (16, 1, 16)]
LENGTHS = [[(0, 1)], [(0, 37)], [(16, 1), (15, 1), (200, 1)], [(5, 9), (130, 1), (0, 1), (63, 18)]]
BLOCK = BLOCK_PAGES * PAGE
# Contexts that end before, at and after the end of a block; more blocks than splits.
LONG_LENGTHS = [[(n - 1, 1) for n in (BLOCK, BLOCK + 1, 2 * BLOCK + 5, 2100)], [(1011, 40), (2, 1)]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 33])
def test_attention_matches_numpy(shape, dtype, window):
    attention = Attention(shape, window, dtype)
    for lengths in LENGTHS:
        case = Case(*shape, dtype, lengths)
        expected = case.expected(attention.scale, window)
        out = attention(case, case.tiles(attention.tile))
        np.testing.assert_allclose(out, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("target", [TARGET, AVX512], ids=["avx2", "avx512"])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 1, 256), (8, 8, 16), (6, 2, 80)])
@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_match_numpy(shape, window, target, needs):
    needs(target)
    attention = Attention(shape, window, target=target)
    for lengths in LONG_LENGTHS:
        case = Case(*shape, "float16", lengths)
        expected = case.expected(attention.scale, window)
        out = attention(case, case.tiles(attention.tile))
        np.testing.assert_allclose(out, expected, atol=2e-5, rtol=1e-4)


# A tile that straddles the end of a block of keys, of a page, of the window; short and full; a
# context of more blocks than there are splits.
TILED_LENGTHS = [
    [(0, 40)], [(120, 20)], [(250, 41), (3, 1), (130, 12)], [(131, 13), (159, 35)], [(2040, 25)]
]  # fmt: skip


@pytest.mark.parametrize("target", [TARGET, AVX512], ids=["avx2", "avx512"])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 8), (3, 1, 80), (14, 2, 16)])
@pytest.mark.parametrize("window", [None, 33, 700])
def test_a_row_does_not_depend_on_its_tile(shape, window, target, needs):
    """Rows in tiles of every size against the same rows alone, to the last bit."""
    needs(target)
    attention = Attention(shape, window, target=target)
    for lengths in TILED_LENGTHS:
        case = Case(*shape, "float16", lengths)
        alone = attention.alone(case).view("int32")
        for tiles in (case.tiles(attention.tile), case.tiles(attention.tile, offset=3)):
            np.testing.assert_array_equal(attention(case, tiles).view("int32"), alone)


@pytest.mark.parametrize("cpu", ["x86-64-v3", "icelake-server", "x86-64", "apple-m1"])
@pytest.mark.parametrize("num_vectors", [1, 3, 7, 24, 64])
def test_parts_are_as_large_as_the_registers_allow(num_vectors, cpu):
    triple = {"mtriple": "aarch64-linux-gnu"} if cpu == "apple-m1" else {}
    isa = isa_of(tvm.target.Target({"kind": "llvm", "mcpu": cpu, **triple}))
    num_parts, size = parts_of(isa, num_vectors)
    assert num_vectors <= num_parts * size < num_vectors + num_parts
    for loaded in {1, max_loaded(isa, size)}:
        per_vector = 16 // isa.lanes
        assert (size * loaded + loaded + 1) * per_vector <= isa.num_registers


def test_plain_attention_matches_numpy():
    case = Case(4, 2, 8, "float32", LENGTHS[3])
    shape = oracle.HeadShape(4, 2, 8, 8, PAGE, "float32")
    for window in (None, 7):
        func = build(oracle.attention(shape, 0.3, window).with_attr("global_symbol", "plain"))
        out = tensor(np.zeros_like(case.q))
        func(
            tensor(case.q), tensor(case.pages), tensor(case.tables), tensor(case.positions),
            tensor(case.tiles(4)), 1, out,
        )  # fmt: skip
        np.testing.assert_allclose(out.numpy(), case.expected(0.3, window), atol=1e-5, rtol=1e-4)


def rotate(x, rotary, rotary_dim):
    half = rotary_dim // 2
    cos, sin = rotary[:, None, :half], rotary[:, None, half:]
    low, high, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


@pytest.mark.parametrize("shape", [(9, 3, 64, 64), (4, 1, 256, 256), (4, 2, 8, 8), (2, 2, 80, 32)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("m", [1, 7, 70])
def test_rotate_and_append_matches_numpy(shape, dtype, m):
    heads, kv_heads, head_dim, rotary_dim = shape
    constants = dict(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary_dim,
        page_size=PAGE, kv_dtype=dtype,
    )  # fmt: skip
    rng = np.random.default_rng(m)
    q, k, v = (
        rng.standard_normal((m, n * head_dim)).astype("float32")
        for n in (heads, kv_heads, kv_heads)
    )
    table = rng.standard_normal((m, rotary_dim)).astype("float32")
    slots = rng.permutation(6 * PAGE)[:m].astype("int32")
    by_head = k.reshape(m, kv_heads, head_dim)
    turned_k = rotate(by_head, table, rotary_dim).astype(dtype)
    turned_q = rotate(q.reshape(m, heads, head_dim), table, rotary_dim).reshape(m, -1)
    expected = np.full((2, 6, 2 * kv_heads, PAGE * head_dim), 3, dtype)
    for i, slot in enumerate(slots):
        page, token = expected[1, slot // PAGE], slot % PAGE
        for h in range(kv_heads):
            page[h, np.arange(head_dim) * PAGE + token] = turned_k[i, h]
            value = v[i, h * head_dim : (h + 1) * head_dim]
            page[kv_heads + h, token * head_dim :][:head_dim] = value
    plain = oracle.rotate_and_append(oracle.HeadShape(**constants))
    for func in (build(rotary.rotate_and_append(**constants)), build(plain)):
        pages = tensor(np.full(expected.shape, 3, dtype))
        out = tensor(np.zeros_like(q))
        func(tensor(q), tensor(k), tensor(v), tensor(table), tensor(slots), pages, 1, out)
        np.testing.assert_allclose(out.numpy(), turned_q, atol=1e-5)
        tolerance = 1e-5 if dtype == "float32" else 4e-3
        np.testing.assert_allclose(
            pages.numpy().astype("float32"), expected.astype("float32"), atol=tolerance
        )


@pytest.mark.parametrize("half", [4, 32, 128])
def test_rotary_table_matches_numpy(half):
    func = build(rotary.rotary_table(half, 1.25))
    positions = np.array([0, 1, 17, 4095, 100000], "int32")
    inv_freq = (10000.0 ** (-np.arange(half) / half)).astype("float32")
    table = tensor(np.zeros((5, 2 * half), "float32"))
    func(tensor(positions), tensor(inv_freq), table)
    angle = (positions[:, None].astype("float32") * inv_freq).astype("float64")
    expected = 1.25 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    np.testing.assert_allclose(table.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("size", [8, 20, 64, 576, 640])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 50])
def test_rms_norm_matches_numpy(size, residual, rows):
    func = build(norm.rms_norm(size, 1e-5, residual))
    rng = np.random.default_rng(rows)
    x, added = (rng.standard_normal((rows, size)).astype("float32") for _ in range(2))
    weight = rng.standard_normal(size).astype("float32")
    y = tensor(np.zeros_like(x))
    extra = [tensor(added)] if residual else []
    func(tensor(x), tensor(weight), *extra, y)
    expected = x / np.sqrt((x.astype("float64") ** 2).mean(1, keepdims=True) + 1e-5) * weight
    expected = expected + added if residual else expected
    np.testing.assert_allclose(y.numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("size", [20, 64, 576])
def test_a_norm_does_not_depend_on_its_batch(size):
    """A row among many, which run on all threads, against the row alone, to the last bit."""
    func = build(norm.rms_norm(size, 1e-5, True))
    rng = np.random.default_rng(size)
    x, added = (rng.standard_normal((500, size)).astype("float32") for _ in range(2))
    weight = tensor(rng.standard_normal(size).astype("float32"))

    def run(rows):
        y = tensor(np.full_like(x[rows], np.nan))
        func(tensor(x[rows]), weight, tensor(added[rows]), y)
        return y.numpy().view("int32")

    together = run(slice(None))
    for i in (0, 1, 250, 499):
        np.testing.assert_array_equal(run(slice(i, i + 1)), together[i : i + 1])
    np.testing.assert_array_equal(run(slice(7, 12)), together[7:12])


def test_take_rows():
    func = build(norm.take_rows(24))
    x = np.arange(5 * 24, dtype="float32").reshape(5, 24)
    y = tensor(np.zeros((3, 24), "float32"))
    func(tensor(x), tensor(np.array([4, 0, 4], "int32")), y)
    np.testing.assert_array_equal(y.numpy(), x[[4, 0, 4]])


def test_exp2_is_exact_enough():
    from everycast.schedules.cpu.kernel import body, kernel
    from everycast.schedules.cpu.vectors import exp2, ramp
    from tvm.tirx.script import builder as B

    with kernel("exp2") as (k, ib):
        x = k.buffer("x", ("n",), "float32")
        y = k.buffer("y", ("n",), "float32")
        with body(), B.serial(k.size("n") // 16) as i:
            B.buffer_store(y, exp2(x[ramp(i * 16)]), [ramp(i * 16)])
    func = build(ib.get())
    points = np.linspace(-126, 126, 16 * 4096, dtype="float32")
    out = tensor(np.zeros_like(points))
    func(tensor(points), out)
    exact = np.exp2(points.astype("float64"))
    assert np.abs(out.numpy() / exact - 1).max() < 3e-7
    assert math.isfinite(out.numpy()[0])
    out = tensor(np.full(16, np.nan, "float32"))
    func(tensor(-np.geomspace(126.5, 1e30, 16, dtype="float32")), out)
    assert not out.numpy().any()
    func(tensor(np.zeros(16, "float32")), out)
    assert (out.numpy() == 1).all()
