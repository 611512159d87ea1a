"""How a build looks on stderr: bars on a terminal, else a line for each stage."""

import sys
import time
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
        self._stage: str | None = None
        self._started = 0.0

    @property
    def progress(self) -> Callable[[BuildProgress], None] | None:
        return None if self._quiet else self._show

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
        elif self._stage is not None and error is None:
            self._end_line()

    def _show(self, event: BuildProgress) -> None:
        if sys.stderr.isatty():
            self._show_bar(event)
        elif event.stage != self._stage:
            self._end_line()
            self._stage, self._started = event.stage, time.perf_counter()

    def _end_line(self) -> None:
        if self._stage is not None:
            console.note(f"{self._stage}: {time.perf_counter() - self._started:.1f} s")

    def _show_bar(self, event: BuildProgress) -> None:
        if self._bars is None:
            self._bars = _bars()
            self._bars.start()
        total = event.total or None
        task = self._tasks.get(event.stage)
        if task is None:
            task = self._tasks[event.stage] = self._bars.add_task(event.stage, total=total)
        self._bars.update(
            task, completed=event.done, total=total, amount=_amount(event), refresh=False
        )


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
