"""What the command line shows: results on stdout, all the rest on stderr."""

import json
import sys
from collections.abc import Sequence
from typing import Any

UNITS = ("B", "kB", "MB", "GB", "TB")


def note(text: str) -> None:
    """One line for the person at the terminal; dim where the terminal can."""
    if sys.stderr.isatty():
        text = f"\x1b[2m{text}\x1b[0m"
    print(text, file=sys.stderr, flush=True)


def error(text: str) -> None:
    """`error: …`, always one line."""
    line = " ".join(text.split())
    label = "\x1b[31merror:\x1b[0m" if sys.stderr.isatty() else "error:"
    print(f"{label} {line}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One line of JSON on stdout, UTF-8 as it is."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def human_bytes(num_bytes: int) -> str:
    """A size in decimal units, three digits: `98.4 MB`."""
    size = float(num_bytes)
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; nothing is cut off when the output is not a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 1000
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def print_models(built: Sequence[dict[str, Any]], known: Sequence[dict[str, Any]]) -> None:
    """The tables of `everycast list`."""
    columns = ["name", "quantization", "bits/weight", "targets", "size", "folder"]
    print_table("Built", columns, [_built_row(record) for record in built])
    rows = [[m["name"], human_bytes(m["num_bytes"]), m["licence"]] for m in known]
    print_table("Known by name", ["name", "size", "licence"], rows)


def _built_row(record: dict[str, Any]) -> list[str]:
    size, path = human_bytes(record["num_bytes"]), record["path"]
    if "error" in record:
        return [record["name"], record["error"], "", "", size, path]
    return [
        record["name"],
        record["quantization"],
        f"{record['bits_per_weight']:.2f}",
        ", ".join(record["targets"]) or "none",
        size,
        path,
    ]


def plain(text: str) -> str:
    """A model's text without the control characters that would steer a terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))
