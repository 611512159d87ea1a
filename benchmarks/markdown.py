"""The Markdown table of docs/performance.md, from the files of `everycast bench --json`.

    python -m everycast.benchmarks.markdown FILE.json…
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER = (
    "| work | activations | threads | everycast | peer | theirs | ratio (rounds) "
    "| of the limit, ours / theirs | bits per weight, ours / theirs |"
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each row that has a peer; see `rows.Row` for the fields."""
    lines = [HEADER, "|---" * (HEADER.count("|") - 1) + "|"]
    lines += [_line(row) for row in rows if row["peer"] is not None]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    unit = "" if row["unit"] == "tokens/s" else f" {row['unit']}"
    cells = [
        row["work"],
        row["activations"],
        str(row["threads"]),
        f"{row['ours']:.4g}{unit}",
        row["peer"],
        f"{row['theirs']:.4g}{unit}",
        f"**{row['ratio']:.2f}** ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})",
        _pair(row["percent_of_limit"], row["peer_percent_of_limit"], "{:.0f} %"),
        _pair(row["bits_per_weight"], row["peer_bits_per_weight"], "{:.2f}"),
    ]
    return f"| {' | '.join(cells)} |"


def _pair(ours: float | None, theirs: float | None, form: str) -> str:
    if ours is None or theirs is None:
        return ""
    return f"{form.format(ours)} / {form.format(theirs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    rows = []
    for file in parser.parse_args().files:
        rows += json.loads(file.read_text(encoding="utf-8"))["rows"]
    print(markdown(rows))


if __name__ == "__main__":
    main()
