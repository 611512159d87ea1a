"""Which parameters to try next, and when one is faster than another."""

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LEAST_NOISE = 0.01
Parameters = dict[str, int]
Space = Mapping[str, Sequence[int]]
"""Values of each parameter, in their order."""


def candidates_of(space: Space) -> list[Parameters]:
    """Every combination of values."""
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


class Search:
    """Candidates, each once: in turn a neighbour of the best so far, and a random one.

    `best` is what was found faster than all before; start with what is known. Neighbours differ in
    one value, which is the next one of the `space`.
    """

    def __init__(
        self, space: Space, candidates: Sequence[Parameters], start: Parameters, seed: str
    ) -> None:
        self.best = start
        self._space = space
        self._left = [candidate for candidate in candidates if candidate != start]
        self._random = random.Random(seed)
        self._turn = 0

    def propose(self) -> Parameters | None:
        """One that was not tried; None when there is none left."""
        if not self._left:
            return None
        near = [candidate for candidate in self._left if self._is_neighbour(candidate)]
        self._turn += 1
        chosen = self._random.choice(near if near and self._turn % 2 else self._left)
        self._left.remove(chosen)
        return chosen

    def _is_neighbour(self, candidate: Parameters) -> bool:
        changed = [name for name in self._space if candidate[name] != self.best[name]]
        if len(changed) != 1:
            return False
        low, high = sorted((candidate[changed[0]], self.best[changed[0]]))
        return not any(low < value < high for value in self._space[changed[0]])


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
