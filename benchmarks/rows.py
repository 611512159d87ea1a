"""Rows of results: medians over the rounds, one row for each work and peer."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .limits import Machine, ModelCost, step_cost
from .samples import OURS, Samples
from .works import Work

UNITS = {"memory": "MB", "start": "s"}
"""Of the works that are not tokens a second. Less is better there."""


@dataclass(frozen=True, slots=True)
class Row:
    """One work, ours beside a peer's. Without a peer its fields are None."""

    work: str
    model: str
    threads: int
    ours: float
    peer: str | None
    theirs: float | None
    ratio: float | None
    """ours / theirs, of medians."""
    percent_of_limit: float | None
    """None where no limit is known."""
    bits_per_weight: float
    peer_bits_per_weight: float | None
    unit: str
    """tokens/s, where more is better; s and MB, where less is."""
    activations: str
    isa: str
    peer_variant: str | None
    """How the peer ran when it was at its best."""
    ratio_low: float | None
    """Smallest and largest ratio of a round."""
    ratio_high: float | None
    peer_percent_of_limit: float | None
    limit: str | None
    bytes_per_step: int | None
    operations_per_step: int | None
    rounds: int
    details: Mapping[str, float]
    """Medians of what else the work measured, of ours."""
    peer_details: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Subject:
    """What the rows of one set of rounds have in common."""

    model: str
    threads: int
    activations: str
    isa: str
    bits_per_weight: float
    peer_bits_per_weight: float
    cost: ModelCost


def rows_of(subject: Subject, works: Sequence[Work], samples: Samples) -> list[Row]:
    """The rows of the works that have figures; engines are called `peer` or `peer, variant`."""
    rows = []
    for work in works:
        figures = samples.figures.get(work.name, {})
        if not figures.get(OURS):
            continue
        peers: list[str | None] = [_peer(name) for name in figures if name != OURS]
        rows += [_row(subject, work, samples, peer) for peer in dict.fromkeys(peers or [None])]
    return rows


def median_machine(samples: Samples) -> Machine:
    """What the machine did at best, medians over the rounds, of which there is one at least."""
    limits = samples.limits
    return Machine(statistics.median(limits["read"]), statistics.median(limits["multiply"]))


def _peer(engine: str) -> str:
    return engine.partition(", ")[0]


def _row(subject: Subject, work: Work, samples: Samples, peer: str | None) -> Row:
    figures, details = samples.figures[work.name], samples.details.get(work.name, {})
    unit = UNITS.get(work.kind, "tokens/s")
    ours = statistics.median(figures[OURS])
    engine, theirs, ratios = None, None, []
    if peer is not None:
        best = min if work.kind in UNITS else max
        candidates = [name for name in figures if name != OURS and _peer(name) == peer]
        engine = best(candidates, key=lambda name: statistics.median(figures[name]))
        theirs = statistics.median(figures[engine])
        # The last round may be cut short.
        ratios = [a / b for a, b in zip(figures[OURS], figures[engine], strict=False)]
    cost = step_cost(work, subject.cost) if samples.limits.get("multiply") else None
    percent, their_percent, limit = None, None, None
    if cost is not None:
        machine = median_machine(samples)
        most = cost.tokens / cost.seconds(machine)
        limit = cost.bound(machine)
        percent = round(100 * ours / most, 1)
        all_bits = step_cost(work, replace(subject.cost, unread_weight_bytes=0))
        if theirs is not None and all_bits is not None:
            most = all_bits.tokens / all_bits.seconds(machine)
            their_percent = round(100 * theirs / most, 1)
    their_bits = samples.ready.get(engine or "", {}).get(
        "bits_per_weight", subject.peer_bits_per_weight
    )
    return Row(
        work=work.name,
        model=subject.model,
        threads=subject.threads,
        ours=_rounded(ours),
        peer=peer,
        theirs=None if theirs is None else _rounded(theirs),
        ratio=None if theirs is None else round(ours / theirs, 3),
        percent_of_limit=percent,
        bits_per_weight=subject.bits_per_weight,
        peer_bits_per_weight=None if peer is None else their_bits,
        unit=unit,
        activations=subject.activations,
        isa=subject.isa,
        peer_variant=None if engine is None else engine.partition(", ")[2],
        ratio_low=round(min(ratios), 3) if ratios else None,
        ratio_high=round(max(ratios), 3) if ratios else None,
        peer_percent_of_limit=their_percent,
        limit=limit,
        bytes_per_step=None if cost is None else round(cost.num_bytes),
        operations_per_step=None if cost is None else round(cost.operations),
        rounds=len(figures[OURS]),
        details=_medians(details.get(OURS, [])),
        peer_details=_medians(details.get(engine or "", [])),
    )


def _rounded(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


def _medians(details: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not details:
        return {}
    return {
        name: _rounded(statistics.median(detail[name] for detail in details)) for name in details[0]
    }
