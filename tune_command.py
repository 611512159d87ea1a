"""`everycast tune`: progress on stderr, a line for each record on stdout."""

import shlex
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from . import console
from .bars import Bars
from .build_view import BuildView

if TYPE_CHECKING:
    from .schedules.tuning.session import TuneEvent
    from .targets.tuning import TuneRequest


def run_tune(request: "TuneRequest", *, device: str | None, quiet: bool, as_json: bool) -> None:
    """Tune, and print what was found, where it is kept, and what to do next.

    `device` (`vulkan:1`) runs the target's kernels; None: the first of its kind.
    KeyboardInterrupt passes, after a word on what is kept.
    """
    from .targets.tuning import Tuning
    from .tuned_devices import device_to_tune

    if request.rpc is None:
        request = replace(request, device=device_to_tune(request.target, device))
    with BuildView(quiet=quiet) as view:
        tuning = Tuning(request, view.bytes_of("fetch") or (lambda done, total: None))
    if not quiet:
        console.note(f"{len(tuning.operators)} operators of {request.model} on {tuning.label}")
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
    if device is not None:
        again += ["--device", device]
    if request.quantization is not None:
        again += ["-q", request.quantization]
    console.note(f"next: {shlex.join(['everycast', *again])}")


def _fields(record: Any) -> dict[str, Any]:
    return asdict(record)


def _outcome(record: Any) -> str:
    if not record.parameters:
        return f"{record.default_us:.1f} µs  default is the fastest of {record.trials + 1}"
    values = " ".join(f"{name}={value}" for name, value in record.parameters.items())
    percent = 100 * (record.default_us / record.tuned_us - 1)
    return f"{record.default_us:.1f} → {record.tuned_us:.1f} µs (+{percent:.1f} %)  {values}"


class TuneView(Bars):
    """A context manager; `report` takes the events of a run: a bar on a terminal, else a line for
    each finished record. `minutes` is the run's limit."""

    def __init__(self, minutes: float | None, *, quiet: bool) -> None:
        super().__init__("count", "best", "remaining", "limit")
        self._quiet = quiet
        self._minutes = minutes
        self._start = time.monotonic()
        self._shown = ""

    def report(self, event: "TuneEvent") -> None:
        if self._quiet:
            return
        name = f"{event.task.operator.name} {event.task.bucket}"
        if self.can_be_seen():
            if self._shown != name:
                self.remove(self._shown)
                self._shown = name
            best, limit = _gain(event.speedup), self._left()
            self.show(name, event.trials, event.total_trials, best=best, limit=limit)
        elif event.kind != "trial":
            did = "tuned before" if event.kind == "skip" else f"{event.trials} trials"
            console.note(f"{name}: {did}, {_gain(event.speedup)}")

    def _left(self) -> str:
        if self._minutes is None:
            return ""
        seconds = max(0, self._start + 60 * self._minutes - time.monotonic())
        return f"{seconds / 60:.1f} min left"


def _gain(speedup: float) -> str:
    return f"best {100 * (speedup - 1):+.1f} %"
