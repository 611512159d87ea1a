"""How a build looks on stderr: bars on a terminal, else a line for each stage."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from . import console
from .build_process import BuildProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class BuildView:
    """A context manager; `progress` is what `build_process.build` wants, None when quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._seen: set[str] = set()

    @property
    def progress(self) -> Callable[[BuildProgress], None] | None:
        return None if self._quiet else self._show

    def bytes_of(self, stage: str) -> Callable[[int, int], None] | None:
        """A callback `(done, total)` in bytes for one stage; None when quiet."""
        if self._quiet:
            return None
        return lambda done, total: self._show(BuildProgress(stage, done, total, "bytes"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _show(self, event: BuildProgress) -> None:
        if sys.stderr.isatty():
            self._show_bar(event)
        elif event.stage not in self._seen:
            self._seen.add(event.stage)
            console.note(f"{event.stage} …")

    def _show_bar(self, event: BuildProgress) -> None:
        if self._bars is None:
            self._bars = _bars()
            self._bars.start()
        total = event.total or None
        if event.stage not in self._tasks:
            self._tasks[event.stage] = self._bars.add_task(event.stage, total=total, amount="")
        task = self._tasks[event.stage]
        self._bars.update(task, completed=event.done, total=total, amount=_amount(event))


def _bars() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def _amount(event: BuildProgress) -> str:
    if event.unit == "bytes":
        done = console.human_bytes(event.done)
        return f"{done} of {console.human_bytes(event.total)}" if event.total else done
    return f"{event.done}/{event.total}" if event.total else ""
