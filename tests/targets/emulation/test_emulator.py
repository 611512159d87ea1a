"""The emulator finds what is wrong with kernels."""

import numpy as np
import pytest
from everycast.schedules.gpu.cuda_instructions import commit_copies, copy_async, wait_for_copies
from everycast.schedules.gpu.kernel import (
    barrier,
    bind,
    body,
    either,
    kernel,
    launch,
    shared,
    store,
    when,
)
from everycast.schedules.gpu.reduce import sum_subgroup
from tvm.script import tirx as T

THREADS = 64


def reverse(name, *, has_barrier=True, size=THREADS, first=0, barrier_for=THREADS):
    """y = x reversed, through shared memory; with what the arguments say, wrong."""
    with kernel(name) as (k, ib):
        x = k.buffer("x", (THREADS,), "float32")
        y = k.buffer("y", (THREADS,), "float32")
        with body(), launch([1], [THREADS]) as (_, (thread,)):
            tile = shared(size)
            store(tile, x[thread], thread + first)
            if has_barrier and barrier_for < THREADS:
                with when(thread < barrier_for):
                    barrier()
            elif has_barrier:
                barrier()
            store(y, tile[THREADS - 1 - thread], thread)
    return ib.get()


def two_barriers():
    """Barriers in both branches of a condition, not the same one for all threads."""
    with kernel("two_barriers") as (k, ib):
        y = k.buffer("y", (THREADS,), "float32")
        with body(), launch([1], [THREADS]) as (_, (thread,)):
            tile = shared(THREADS)
            store(tile, T.float32(1), thread)
            either(thread < 32, barrier, barrier)
            store(y, tile[thread], thread)
    return ib.get()


def sums(name, *, lanes_that_come=32):
    with kernel(name) as (k, ib):
        x = k.buffer("x", (THREADS,), "float32")
        y = k.buffer("y", (2,), "float32")
        with body(), launch([1], [THREADS]) as (_, (thread,)):
            lane = bind(T.truncmod(thread, 32))
            if lanes_that_come == 32:
                total = sum_subgroup(x[thread], 32, 32)
                with when(lane == 0):
                    store(y, total, T.truncdiv(thread, 32))
            else:
                with when(lane < lanes_that_come):
                    store(y, sum_subgroup(x[thread], 32, 32), T.truncdiv(thread, 32))
    return ib.get()


def copies(name, *, waits=True, first=0):
    with kernel(name) as (k, ib):
        x = k.buffer("x", (THREADS * 4 + 1,), "float32")
        y = k.buffer("y", (THREADS,), "float32")
        with body(), launch([1], [THREADS]) as (_, (thread,)):
            tile = shared(THREADS * 4)
            copy_async(tile, thread * 4, x, thread * 4 + first)
            commit_copies()
            if waits:
                wait_for_copies()
            barrier()
            store(y, tile[(THREADS - 1 - thread) * 4], thread)
            if not waits:
                wait_for_copies()
    return ib.get()


@pytest.fixture(scope="module")
def emulated(cuda_emulator):
    program = cuda_emulator.Emulated([
        reverse("good"),
        reverse("no_barrier", has_barrier=False),
        reverse("half_a_barrier", barrier_for=THREADS // 2),
        reverse("beyond", first=1),
        reverse("unwritten", size=2 * THREADS, first=THREADS),
        two_barriers(),
        sums("warp_sums"), sums("half_a_warp", lanes_that_come=16),
        copies("copies"), copies("no_wait", waits=False), copies("misaligned", first=1),
    ])  # fmt: skip
    yield program
    program.close()


X = np.arange(THREADS, dtype="float32")
Y = np.full(THREADS, 7, "float32")
MANY = np.arange(4 * THREADS + 1, dtype="float32")


def test_what_is_right_runs(emulated):
    np.testing.assert_array_equal(emulated.run("good", X, Y)[1], X[::-1])
    totals = emulated.run("warp_sums", X, np.zeros(2, "float32"))[1]
    np.testing.assert_array_equal(totals, [X[:32].sum(), X[32:].sum()])
    np.testing.assert_array_equal(emulated.run("copies", MANY, Y)[1], MANY[:-1:4][::-1])
    assert emulated.launches == ["copies_kernel"] * 3


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no_barrier", (X, Y), "depends on the order of threads"),
        ("half_a_barrier", (X, Y), "a barrier that not all threads come to: thread 32 has ended"),
        ("two_barriers", (Y,), "a barrier that not all threads come to: thread 32 waits"),
        ("beyond", (X, Y), "AddressSanitizer: heap-buffer-overflow"),
        ("half_a_warp", (X, np.zeros(2, "float32")), "for lanes that do not come"),
        ("no_wait", (MANY, Y), "depends on the order of threads"),
        ("misaligned", (MANY, Y), "cp.async of 16 bytes between addresses that are not aligned"),
    ],
)
def test_what_is_wrong_is_found(cuda_emulator, emulated, name, arguments, message):
    with pytest.raises(cuda_emulator.EmulationError, match=message):
        emulated.run(name, *arguments)
    np.testing.assert_array_equal(emulated.run("good", X, Y)[1], X[::-1])  # it goes on


def test_shared_memory_that_nobody_wrote_is_not_a_number(emulated):
    assert np.isnan(emulated.run("unwritten", X, Y)[1]).all()


def test_an_unknown_instruction_is_named(cuda_emulator):
    source = 'asm volatile("bar.red.popc.u32 %0, 1;" : "=r"(x) : "r"(y));'
    with pytest.raises(ValueError, match="no emulation of the instruction: bar"):
        cuda_emulator.language.translated(source)
