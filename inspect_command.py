"""`everycast inspect`: what is in an artifact's libraries, as tables and as JSON."""

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from . import console
from .artifact.files import atomic_write

if TYPE_CHECKING:
    from .targets.inspection.report import KernelUse, LibraryReport

_COLUMNS = {
    "registers": "registers",
    "scalar_registers": "scalar",
    "threads": "threads",
    "buffers": "buffers",
    "bindings": "bindings",
    "shared_bytes": "shared B",
    "stack_bytes": "stack B",
    "spills": "spills",
    "code_bytes": "code B",
    "instructions": "instructions",
}
"""Fields of a kernel → heads of the table's columns."""


def run_inspect(folder: Path, json: Path | None) -> bool:
    """Print a table for each library of the artifact in `folder`; with `json`, write everything to
    that file too. Whether nothing is wrong with any library that could be read."""
    from .targets.inspection.artifact import inspect_artifact

    reports = inspect_artifact(folder)
    for report in reports:
        _print_report(report)
    if json is not None:
        records = [asdict(report) for report in reports]
        atomic_write(json, json_format.dumps(records, indent=1).encode())
        console.note(f"written: {json}")
    return not any(report.finding is not None and report.finding.faults for report in reports)


def _print_report(report: "LibraryReport") -> None:
    """A heading, what was found, and a row for each kernel."""
    head = f"{report.target}: {report.file}, {console.human_bytes(report.num_bytes)}"
    if report.finding is None:
        print(f"{head}\n  not inspected: {report.missing}\n")
        return
    finding = report.finding
    print(f"{head}, {len({k.name for k in finding.kernels})} kernels, read by {finding.tool}")
    for fact in finding.facts:
        print(f"  {fact}")
    for fault in finding.faults:
        print(f"  WRONG: {fault}")
    by_name: dict[str, list[KernelUse]] = {}
    for kernel in finding.kernels:
        by_name.setdefault(kernel.name, []).append(kernel)
    used = [f for f in _COLUMNS if any(getattr(k, f) is not None for k in finding.kernels)]
    rows = [
        [name, *(_range([getattr(kernel, field) for kernel in kernels]) for field in used)]
        for name, kernels in sorted(by_name.items())
    ]
    console.print_table("", ["kernel", *(_COLUMNS[field] for field in used)], rows)


def _range(values: Sequence[int | None]) -> str:
    """`12`, or `12-40` over the architectures; `-` where the tool does not say."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    least, most = min(known), max(known)
    return str(least) if least == most else f"{least}-{most}"
