"""The emulator of Metal's language: simdgroup matrices, and what goes wrong with them."""

import numpy as np
import pytest
from everycast.schedules.gpu.kernel import barrier, body, kernel, launch, shared, store, strided
from everycast.schedules.gpu.reduce import sum_subgroup
from tvm.backend.metal.op import (
    make_filled_simdgroup_matrix,
    simdgroup_load,
    simdgroup_multiply_accumulate,
    simdgroup_store,
)
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

SIZE = 64


def matrices(dtype, count=1):
    return B.alloc_buffer((count * SIZE,), dtype, scope="metal.simdgroup")


def product(name, *, sync="warp", apart=0):
    """y = 1 + a bᵀ, each 8 x 8, by a simdgroup; with what the arguments say, wrong."""
    with kernel(name) as (k, ib):
        a, b = (k.buffer(of, (SIZE + 8,), "float16") for of in "ab")
        y = k.buffer("y", (SIZE,), "float32")
        with body(), launch([1], [32]) as (_, (lane,)):
            tile, sums = shared(SIZE), matrices("float32")
            factors = matrices("float16", 2)
            B.evaluate(make_filled_simdgroup_matrix(sums.data, 0, T.float32(1)))
            B.evaluate(simdgroup_load(factors.data, 0, T.address_of(a[lane * apart]), 8))
            B.evaluate(
                simdgroup_load(factors.data, 1, T.address_of(b[0]), 8, transpose_matrix=True)
            )
            B.evaluate(
                simdgroup_multiply_accumulate(
                    sums.data, 0, factors.data, 0, factors.data, 1, sums.data, 0
                )
            )
            B.evaluate(simdgroup_store(sums.data, 0, T.address_of(tile[0]), 8))
            if sync:
                B.evaluate(T.tvm_storage_sync(sync))
            for i in strided(SIZE, lane, 32):
                store(y, tile[i], i)
            barrier()
    return ib.get()


def sums(name, lanes):
    """y[i] = what lane i has of the sums over `lanes` lanes."""
    with kernel(name) as (k, ib):
        x, y = (k.buffer(of, (32,), "float32") for of in "xy")
        with body(), launch([1], [32]) as (_, (lane,)):
            store(y, sum_subgroup(x[lane], lanes, 32), lane)
    return ib.get()


@pytest.fixture(scope="module")
def emulated(metal_emulator):
    program = metal_emulator.Emulated([
        product("good"), product("no_barrier", sync=""), product("apart", apart=1),
        sums("sums", 32), sums("short_sums", 8),
    ])  # fmt: skip
    yield program
    program.close()


RNG = np.random.default_rng(0)
A, B_ = RNG.standard_normal((2, SIZE + 8)).astype("float16")
Y = np.full(SIZE, 7, "float32")


def test_products(emulated):
    a, b = A[:SIZE].reshape(8, 8).astype(float), B_[:SIZE].reshape(8, 8).astype(float)
    y = emulated.run("good", A, B_, Y)[-1]
    np.testing.assert_allclose(y.reshape(8, 8), 1 + a @ b.T, rtol=1e-5, atol=1e-5)


def test_sums_over_lanes(emulated):
    x = np.arange(32, dtype="float32")
    whole = emulated.run("sums", x, np.zeros_like(x))[-1]
    assert whole[0] == x.sum()
    assert np.isnan(whole[1:]).all()  # they have read lanes that are not there
    short = emulated.run("short_sums", x, np.zeros_like(x))[-1]
    np.testing.assert_array_equal(short[::8], x.reshape(4, 8).sum(1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_barrier", "depends on the order of threads"),
        ("apart", "lanes 1 and 0 of a simdgroup move a matrix from or to different places"),
    ],
)
def test_what_is_wrong_is_found(metal_emulator, emulated, name, message):
    with pytest.raises(metal_emulator.EmulationError, match=message):
        emulated.run(name, A, B_, Y)
