"""Which parameters to try next, and when one is faster than another."""

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..linear_schedule import Bucket, LinearSchedule

_PREFETCH = (0, 1024, 2048, 4096, 8192, 16384)
SPACES: dict[Bucket, dict[str, tuple[int, ...]]] = {
    "many": {
        "tile_tokens": (2, 4, 6, 8, 12, 16),
        "chunk_bytes": tuple(1 << i for i in range(17, 22)),
        "prefetch_many": _PREFETCH,
    },
    "few": {"prefetch_few": _PREFETCH},
    "one": {"prefetch_one": _PREFETCH},
}
"""Values of the parameters that matter to each bucket of tokens, in their order. The largest tile
comes first: the other tiles depend on it."""
_LEAST_NOISE = 0.01
Parameters = dict[str, int]


def bucket_parameters(schedule: LinearSchedule, bucket: Bucket) -> Parameters:
    """The schedule's values of a bucket's parameters."""
    return {name: getattr(schedule, name) for name in SPACES[bucket]}


def num_candidates(space: Mapping[str, Sequence[int]]) -> int:
    count = 1
    for values in space.values():
        count *= len(values)
    return count


class Search:
    """Candidates of a space, each once: in turn a neighbour of the best so far, and a random one.

    `best` is what was found faster than all before; start with what is known.
    """

    def __init__(self, bucket: Bucket, start: Parameters, seed: str) -> None:
        self.space = SPACES[bucket]
        self.best = start
        self._random = random.Random(seed)
        self._tried = {tuple(start.values())}
        self._turn = 0

    def propose(self) -> Parameters | None:
        """One that was not tried; None when there is none left."""
        left = [c for c in self._all() if tuple(c.values()) not in self._tried]
        if not left:
            return None
        near = [candidate for candidate in left if self._is_neighbour(candidate)]
        self._turn += 1
        chosen = self._random.choice(near if near and self._turn % 2 else left)
        self._tried.add(tuple(chosen.values()))
        return chosen

    def _all(self) -> Iterator[Parameters]:
        candidates: list[Parameters] = [{}]
        for name, values in self.space.items():
            candidates = [{**c, name: value} for c in candidates for value in values]
        return iter(candidates)

    def _is_neighbour(self, candidate: Parameters) -> bool:
        """Whether one value is another, the next of its parameter."""
        changed = [name for name in self.space if candidate[name] != self.best[name]]
        if len(changed) != 1:
            return False
        low, high = sorted((candidate[changed[0]], self.best[changed[0]]))
        return not any(low < value < high for value in self.space[changed[0]])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Times of two kernels that ran in turn, a pair a round, in seconds of one call."""

    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of after / before: below 1 is faster."""
        return statistics.median(self._ratios())

    @property
    def noise(self) -> float:
        """Half of the range that the middle half of the ratios lies in, at least 1 %."""
        low, _, high = statistics.quantiles(self._ratios(), n=4)
        return max(_LEAST_NOISE, (high - low) / 2)

    @property
    def is_faster(self) -> bool:
        """By more than the noise."""
        return self.ratio < 1 - self.noise

    def _ratios(self) -> list[float]:
        return [a / b for b, a in zip(self.before, self.after, strict=True)]

    def microseconds(self) -> tuple[float, float]:
        """The median before, and what the ratio makes of it."""
        before = statistics.median(self.before) * 1e6
        return round(before, 2), round(before * self.ratio, 2)
