"""Control flow for emitted kernels: branches, and loops that wake threads only when it pays."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

_MIN_PARALLEL_WORK = 8192
Branches = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@contextmanager
def either(condition: Any) -> Iterator[Branches]:
    """`with either(c) as (then, otherwise):`, and emit each branch inside its own context."""
    with B.If(condition):
        yield B.Then(), B.Else()


def for_rows(num_rows: Any, work_per_row: int, emit: Callable[[Any], None]) -> None:
    """`emit(row)` for each row, on all threads unless the whole is too little work for two.

    `work_per_row` is in elements of light work: waking threads costs as much as some thousand.
    """
    few = max(1, _MIN_PARALLEL_WORK // work_per_row)
    with either(num_rows <= few) as (serial, parallel):
        with serial, B.serial(num_rows) as row:
            emit(row)
        with parallel, B.parallel(num_rows) as row:
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
