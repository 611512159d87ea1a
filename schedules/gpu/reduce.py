"""Sums and largest values over the threads of a block: in shared memory, which is right for any
subgroup width, or over the threads of a subgroup."""

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from .kernel import barrier, bind, shared, store, when


def sum_lanes(buffer: Any, starts: Sequence[Any], lane: Any, lanes: int) -> None:
    """For each start, buffer[start] = the sum of buffer[start + i] for i below `lanes`.

    `lanes` is a power of two. All threads of the block call it, each after it has written its own
    elements; `lane` is the thread's own i. The sums are there for all threads afterwards.
    """
    _reduce(buffer, starts, lane, lanes, lambda a, b: a + b)


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
    power of two, at most `subgroup`. All threads of the block call it at the same point."""
    by = lanes // 2
    while by:
        everyone = T.uint32(0xFFFFFFFF)
        value = bind(value + T.tvm_warp_shuffle_down(everyone, value, by, lanes, subgroup))
        by //= 2
    return value


def _reduce(
    buffer: Any, starts: Sequence[Any], lane: Any, lanes: int, combine: Callable[[Any, Any], Any]
) -> None:
    half = lanes // 2
    while half:
        barrier()
        with when(lane < half):
            for start in starts:
                here = start + lane
                store(buffer, combine(buffer[here], buffer[here + half]), here)
        half //= 2
    barrier()
