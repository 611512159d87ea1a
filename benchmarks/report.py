"""The rows as a table in Markdown."""

from collections.abc import Sequence

from .rows import Row

_HEAD = (
    "work",
    "threads",
    "activations",
    "everycast",
    "peer",
    "theirs",
    "ratio (rounds)",
    "of the limit",
    "limit",
    "bits per weight",
)


def table(rows: Sequence[Row]) -> str:
    """One line for each row."""
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    return "\n".join([*lines, *(_line(_cells(row)) for row in rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> list[str]:
    variant = f" ({row.peer_variant})" if row.peer_variant else ""
    return [
        row.work,
        str(row.threads),
        row.activations,
        f"{_number(row.ours)} {row.unit}",
        f"{row.peer}{variant}" if row.peer else "",
        _number(row.theirs),
        _ratio(row),
        _pair(row.percent_of_limit, row.peer_percent_of_limit, "{:.0f} %"),
        row.limit or "",
        _pair(row.bits_per_weight, row.peer_bits_per_weight, "{:.2f}"),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    return f"**{row.ratio:.2f}** ({row.ratio_low:.2f}-{row.ratio_high:.2f})"


def _pair(ours: float | None, theirs: float | None, form: str) -> str:
    return " / ".join(form.format(value) for value in (ours, theirs) if value is not None)


def details(rows: Sequence[Row]) -> str:
    """What the works measured beside their figure, a line for each engine; empty if nothing."""
    lines = []
    for row in rows:
        for engine, values in (("everycast", row.details), (row.peer, row.peer_details)):
            if values:
                text = ", ".join(f"{name} {_number(value)}" for name, value in values.items())
                lines.append(f"{row.work}, {row.threads} threads, {engine}: {text}")
    return "\n".join(dict.fromkeys(lines))
