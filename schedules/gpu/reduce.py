"""Sums over the threads of a block, in shared memory: right for any subgroup width."""

from collections.abc import Sequence
from typing import Any

from .kernel import barrier, store, when


def sum_lanes(buffer: Any, starts: Sequence[Any], lane: Any, lanes: int) -> None:
    """For each start, buffer[start] = the sum of buffer[start + i] for i below `lanes`.

    `lanes` is a power of two. All threads of the block call it, each after it has written its own
    elements; `lane` is the thread's own i. The sums are there for all threads afterwards.
    """
    half = lanes // 2
    while half:
        barrier()
        with when(lane < half):
            for start in starts:
                here = start + lane
                store(buffer, buffer[here] + buffer[here + half], here)
        half //= 2
    barrier()
