"""Control flow for emitted kernels: branches, and loops that wake threads only when it pays."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .kernel import current_kernel
from .shared_loop import emit_finish, emit_take
from .vectors import ON_THE_STACK

_MIN_PARALLEL_WORK = 8192
_BITES_PER_SHARE = 4
Branches = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@contextmanager
def either(condition: Any) -> Iterator[Branches]:
    """`with either(c) as (then, otherwise):`, and emit each branch inside its own context."""
    with B.If(condition):
        yield B.Then(), B.Else()


@contextmanager
def parallel(extent: Any) -> Iterator[Any]:
    """`with parallel(n) as i:` over [0, n), on all threads: by TVM's pool, or in a subroutine by
    the threads that call it, which take consecutive iterations, a few at a time."""
    team = current_kernel().team
    if team is None:
        with B.parallel(extent) as i:
            yield i
        return
    extent = B.Bind(extent)
    threads = team.num_threads
    with B.If(extent == 0), B.Then():
        emit_finish(team.done, T.int64(0), extent)
    # Several bites, for others to take over; one thread has nobody to share with.
    bites = T.if_then_else(threads == 1, T.int64(1), T.int64(_BITES_PER_SHARE))
    bite = B.Bind((extent + (threads * bites - 1)) // (threads * bites))
    taken, finished = (B.alloc_buffer((1,), "int64", annotations=ON_THE_STACK) for _ in range(2))
    B.buffer_store(finished, T.int64(0), [0])
    with B.serial(threads) as turn:
        owner = B.Bind((team.thread + turn) % threads)
        start = B.Bind(owner * extent // threads)
        size = B.Bind((owner + 1) * extent // threads - start)
        share = T.address_of(team.shares[owner, 0])
        B.buffer_store(taken, emit_take(share, team.loop, size, bite), [0])
        with B.While(taken[0] >= 0):
            first = B.Bind(taken[0])
            count = B.Bind(T.min(bite, size - first))
            with B.serial(count) as i:
                yield B.Bind(start + first + i)
            B.buffer_store(finished, finished[0] + count, [0])
            B.buffer_store(taken, emit_take(share, team.loop, size, bite), [0])
    with B.If(finished[0] > 0), B.Then():
        emit_finish(team.done, finished[0], extent)


def for_rows(num_rows: Any, work_per_row: int, emit: Callable[[Any], None]) -> None:
    """`emit(row)` for each row, on all threads unless the whole is too little work for two.

    `work_per_row` is in elements of light work: waking threads costs as much as some thousand. In a
    subroutine threads are awake.
    """
    if current_kernel().team is not None:
        with parallel(num_rows) as row:
            emit(row)
        return
    few = max(1, _MIN_PARALLEL_WORK // work_per_row)
    with either(num_rows <= few) as (serial, threads):
        with serial, B.serial(num_rows) as row:
            emit(row)
        with threads, B.parallel(num_rows) as row:
            emit(row)


def for_tiles(
    start: Any, stop: Any, tiles: tuple[int, ...], emit: Callable[[Any, int], None]
) -> None:
    """`emit(first, size)` over [start, stop): as many of the largest tile as fit, then tails.

    `tiles`: sizes, largest first; all but the first are the powers of two below it.
    """
    largest = tiles[0]
    count = B.Bind(stop - start)
    with B.serial(count // largest) as tile:
        emit(B.Bind(start + tile * largest), largest)
    rest = B.Bind(count % largest)
    for size in tiles[1:]:
        with B.If(rest & size != 0), B.Then():
            emit(B.Bind(stop - rest % (2 * size)), size)


def clear(buffer: Any, num_vectors: int) -> None:
    for i in range(num_vectors):
        B.buffer_store(buffer, T.broadcast(T.float32(0), 16), [T.ramp(i * 16, 1, 16)])
