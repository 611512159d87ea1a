"""`everycast tune`: progress on stderr, a line for each record on stdout."""

import shlex
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from . import console
from .build_view import BuildView

if TYPE_CHECKING:
    from rich.progress import Progress

    from .schedules.cpu.tuning.session import TuneEvent
    from .targets.tuning import TuneRequest


def run_tune(request: "TuneRequest", *, quiet: bool, as_json: bool) -> None:
    """Tune, and print what was found, where it is kept, and what to do next.

    KeyboardInterrupt passes, after a word on what is kept.
    """
    from .targets.tuning import Tuning

    with BuildView(quiet=quiet) as view:
        tuning = Tuning(request, view.bytes_of("fetch") or (lambda done, total: None))
    if not quiet:
        console.note(f"{len(tuning.operators)} operators of {request.model} on {tuning.cpu}")
    try:
        with TuneView(request.minutes, quiet=quiet) as tune_view:
            result = tuning.run(tune_view.report)
    except KeyboardInterrupt:
        console.note(f"stopped; {tuning.file} keeps what is finished, the same command goes on")
        raise
    if as_json:
        console.print_json(
            {
                "file": str(result.file),
                "skipped": result.num_skipped,
                "records": [
                    {"operator": name, "bucket": bucket, **_fields(record)}
                    for name, bucket, record in result.new
                ],
            }
        )
        return
    for name, bucket, record in result.new:
        print(f"{name}  {bucket:4}  {_outcome(record)}")
    if quiet:
        return
    num_tuned = sum(bool(record.parameters) for _, _, record in result.new)
    console.note(
        f"{num_tuned} of {len(result.new)} faster than the default, {result.num_skipped} "
        f"tuned before; kept in {result.file}"
    )
    again = ["compile", request.model, "--target", request.target]
    if request.quantization is not None:
        again += ["-q", request.quantization]
    console.note(f"next: {shlex.join(['everycast', *again])}")


def _fields(record: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(record)


def _outcome(record: Any) -> str:
    if not record.parameters:
        return f"{record.default_us:.1f} µs  default is the fastest of {record.trials + 1}"
    values = " ".join(f"{name}={value}" for name, value in record.parameters.items())
    percent = 100 * (record.default_us / record.tuned_us - 1)
    return f"{record.default_us:.1f} → {record.tuned_us:.1f} µs (+{percent:.1f} %)  {values}"


class TuneView:
    """A context manager; `report` takes the events of a run: a bar on a terminal, else a line for
    each finished record. `minutes` is the run's limit."""

    def __init__(self, minutes: float | None, *, quiet: bool) -> None:
        self._quiet = quiet
        self._minutes = minutes
        self._start = time.monotonic()
        self._bar: Progress | None = None
        self._task: Any = None
        self._shown: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, event: "TuneEvent") -> None:
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._show_bar(event)
        elif event.kind != "trial":
            did = "tuned before" if event.kind == "skip" else f"{event.trials} trials"
            name, bucket = event.task.operator.name, event.task.bucket
            console.note(f"{name} {bucket}: {did}, {_gain(event.speedup)}")

    def _show_bar(self, event: "TuneEvent") -> None:
        if self._bar is None:
            self._bar = _bar()
            self._bar.start()
        if self._shown != event.task:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._shown = event.task
            name = f"{event.task.operator.name} {event.task.bucket}"
            self._task = self._bar.add_task(name, total=None, best="", limit="")
        self._bar.update(
            self._task,
            completed=event.trials,
            total=event.total_trials,
            best=_gain(event.speedup),
            limit=self._left(),
        )

    def _left(self) -> str:
        if self._minutes is None:
            return ""
        seconds = max(0, self._start + 60 * self._minutes - time.monotonic())
        return f"{seconds / 60:.1f} min left"


def _gain(speedup: float) -> str:
    return f"best {100 * (speedup - 1):+.1f} %"


def _bar() -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}", markup=False),
        TimeRemainingColumn(),
        TextColumn("{task.fields[limit]}", markup=False),
        console=Console(stderr=True),
    )
