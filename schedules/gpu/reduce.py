"""Sums and largest values over the threads of a block: in shared memory, which is right for any
subgroup width, or over the threads of a subgroup."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from .kernel import barrier, bind, floor_div, floor_mod, shared, store, when

Combine = Callable[[Any, Any], Any]


def sum_lanes(buffer: Any, starts: Sequence[Any], lane: Any, lanes: int) -> None:
    """For each start, buffer[start] = the sum of buffer[start + i] for i below `lanes`.

    `lanes` is a power of two. All threads of the block call it, each after it has written its own
    elements; `lane` is the thread's own i. The sums are there for all threads afterwards.
    """
    _reduce(buffer, starts, lane, lanes, _add)


def max_lanes(buffer: Any, starts: Sequence[Any], lane: Any, lanes: int) -> None:
    """As `sum_lanes`, with the largest in place of the sum."""
    _reduce(buffer, starts, lane, lanes, T.max)


def over_lanes(
    sums: Any, count: int, lane: Any, lanes: int, team: Any, teams: int, subgroup: int | None
) -> Callable[[int], Any]:
    """A function from the number of one of a thread's `count` sums to its sum over the lanes of the
    thread's team, right in lane 0. In registers if lanes are neighbours in a `subgroup`."""
    if subgroup is not None:
        totals = [sum_subgroup(sums[i], lanes, subgroup) for i in range(count)]
        return lambda i: totals[i]
    partial = shared(count * teams * lanes)
    starts = [bind((i * teams + team) * lanes) for i in range(count)]
    for i, start in enumerate(starts):
        store(partial, sums[i], start + lane)
    sum_lanes(partial, starts, lane, lanes)
    return lambda i: partial[starts[i]]


def sum_subgroup(value: Any, lanes: int, subgroup: int) -> Any:
    """The sum of `value` over the `lanes` threads that share it, right in the first of them; a
    power of two, at most `subgroup`. All threads of the block call it at the same point.

    The first of them reads no lane beyond its own `lanes`, so that the subgroup may be wider."""
    return _subgroup(value, lanes, subgroup, _add)


def sum_block(value: Any, thread: Any, threads: int, subgroup: int | None) -> Any:
    """The sum of `value` over the `threads` of a block, a power of two, for all of them.

    All of them call it at the same point. With a `subgroup` there is one barrier: its threads hand
    each other values, then each thread adds what the subgroups found.
    """
    return _block(value, thread, threads, subgroup, _add)


def max_block(value: Any, thread: Any, threads: int, subgroup: int | None) -> Any:
    """As `sum_block`, with the largest in place of the sum."""
    return _block(value, thread, threads, subgroup, T.max)


def _add(a: Any, b: Any) -> Any:
    return a + b


def _subgroup(value: Any, lanes: int, subgroup: int, combine: Combine) -> Any:
    by = lanes // 2
    while by:
        everyone = T.uint32(0xFFFFFFFF)
        other = T.tvm_warp_shuffle_down(everyone, value, by, lanes, subgroup)
        value = bind(combine(value, other))
        by //= 2
    return value


def _block(value: Any, thread: Any, threads: int, subgroup: int | None, combine: Combine) -> Any:
    if subgroup is None or threads < subgroup:
        partial = shared(threads)
        store(partial, value, thread)
        _reduce(partial, [0], thread, threads, combine)
        return bind(partial[0])
    partial = shared(threads // subgroup)
    found = _subgroup(value, subgroup, subgroup, combine)
    with when(floor_mod(thread, subgroup) == 0):
        store(partial, found, floor_div(thread, subgroup))
    barrier()
    parts = (partial[i] for i in range(threads // subgroup))
    return bind(functools.reduce(combine, parts))


def _reduce(buffer: Any, starts: Sequence[Any], lane: Any, lanes: int, combine: Combine) -> None:
    half = lanes // 2
    while half:
        barrier()
        with when(lane < half):
            for start in starts:
                here = start + lane
                store(buffer, combine(buffer[here], buffer[here + half]), here)
        half //= 2
    barrier()
