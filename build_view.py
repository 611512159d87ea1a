"""How a build looks on stderr: bars on a terminal, else a line for each stage."""

from collections.abc import Callable

from . import console
from .bars import Bars
from .build_process import BuildProgress


class BuildView(Bars):
    """A context manager; `progress` is what `build_process.build` wants, None when quiet."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__("amount", "elapsed")
        self._quiet = quiet
        self._seen: set[str] = set()

    @property
    def progress(self) -> Callable[[BuildProgress], None] | None:
        return None if self._quiet else self._report

    def bytes_of(self, stage: str) -> Callable[[int, int], None] | None:
        """A callback `(done, total)` in bytes for one stage; None when quiet."""
        if self._quiet:
            return None
        return lambda done, total: self._report(BuildProgress(stage, done, total, "bytes"))

    def _report(self, event: BuildProgress) -> None:
        if self.can_be_seen():
            self.show(event.stage, event.done, event.total or None, amount=_amount(event))
        elif event.stage not in self._seen:
            self._seen.add(event.stage)
            console.note(f"{event.stage} …")


def _amount(event: BuildProgress) -> str:
    if event.unit == "bytes":
        done = console.human_bytes(event.done)
        return f"{done} of {console.human_bytes(event.total)}" if event.total else done
    return f"{event.done}/{event.total}" if event.total else ""
