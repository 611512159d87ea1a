"""Bars on stderr, for views of long work; rich is imported with the first one."""

import sys
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID


class Bars:
    """A context manager; at its end the bars stay as they are."""

    def __init__(self, *columns: str) -> None:
        """columns: what follows each bar, from left to right: `count`, `elapsed`, `remaining`, or
        the name of a text that `show` is given."""
        self._columns = columns
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    @staticmethod
    def can_be_seen() -> bool:
        """Whether stderr is a terminal; elsewhere lines are better."""
        return sys.stderr.isatty()

    def show(self, name: str, done: int, total: int | None, **texts: str) -> None:
        """The bar of that name, which is added below the others if it is new. A total of None is
        not known."""
        if self._progress is None:
            self._progress = _progress(self._columns)
            self._progress.start()
        fields: dict[str, Any] = {**texts}  # rich has arguments of other types beside them
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, **fields)
        self._progress.update(self._tasks[name], completed=done, total=total, **fields)

    def remove(self, name: str) -> None:
        """Take a bar away, if it is there."""
        if self._progress is not None and name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))


def _progress(columns: tuple[str, ...]) -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    known: dict[str, type[ProgressColumn]] = {
        "count": MofNCompleteColumn,
        "elapsed": TimeElapsedColumn,
        "remaining": TimeRemainingColumn,
    }
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *(
            known[column]()
            if column in known
            else TextColumn(f"{{task.fields[{column}]}}", markup=False)
            for column in columns
        ),
        console=Console(stderr=True),
    )
