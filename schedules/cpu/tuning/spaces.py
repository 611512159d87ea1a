"""What is searched for each bucket of tokens."""

from collections.abc import Mapping

from ...tuning.search import Parameters, Space
from ..linear_schedule import LinearSchedule

MANY_TOKENS = 256
"""Batch that the largest tiles are timed with."""
_PREFETCH = (0, 1024, 2048, 4096, 8192, 16384)
SPACES: Mapping[str, Space] = {
    "many": {
        "many_tokens": (0, 16),
        "tile_tokens": (2, 4, 6, 8, 12, 16),
        "chunk_bytes": tuple(1 << i for i in range(17, 22)),
        "prefetch_many": _PREFETCH,
    },
    "few": {"prefetch_few": _PREFETCH},
    "one": {"prefetch_one": _PREFETCH},
}
"""Values of the parameters that matter to each `linear_schedule.Bucket`, in their order. The
largest tile comes before what depends on it."""


def bucket_parameters(schedule: LinearSchedule, bucket: str) -> Parameters:
    """The schedule's values of a bucket's parameters."""
    return {name: getattr(schedule, name) for name in SPACES[bucket]}
