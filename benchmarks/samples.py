"""What the rounds gave, before any median is taken."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

OURS = "everycast"


@dataclass(slots=True)
class Samples:
    """`figures[work][engine]`: a figure of each round, in the work's unit. `details` alike, for
    works that measure more than one thing. `limits`: what the machine did at best in each round.
    `ready`: what each engine says of itself."""

    figures: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    details: dict[str, dict[str, list[dict[str, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    limits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ready: dict[str, dict[str, Any]] = field(default_factory=dict)

    def drop(self, work: str, engine: str) -> None:
        """Forget an engine that could not finish a work."""
        self.figures[work].pop(engine, None)
        self.details[work].pop(engine, None)
