"""Rounds: each work on each engine in turn, while the others sleep."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Protocol

from .busy_cpus import busy_cpus
from .samples import OURS, Samples
from .workers import BenchError, Worker, WorkerError
from .works import Work

LIMITS = ("read", "multiply")
Note = Callable[[str], None]
StartWorker = Callable[[], Worker]


class Contender(Protocol):
    """An engine that can be told to do a work, alone on the machine."""

    def figure(self, work: Work) -> tuple[float, dict[str, float]]:
        """The work's figure and details; BenchError if it cannot."""


class LoadedEngine:
    """An engine in a worker, loaded once and warm."""

    def __init__(self, start: StartWorker, stack: ExitStack) -> None:
        """Raises WorkerError if the worker does not start."""
        self._start = start
        self._stack = stack
        self.worker = stack.enter_context(start())

    def figure(self, work: Work) -> tuple[float, dict[str, float]]:
        """Tokens a second."""
        try:
            answer = self.worker.measure(work.name)
        except WorkerError:
            # One work ended it; the others get a new process.
            self.worker = self._stack.enter_context(self._start())
            raise
        return answer["tokens"] / answer["seconds"], {}


def run_rounds(
    engines: Mapping[str, Contender],
    works: Sequence[Work],
    num_rounds: int,
    samples: Samples,
    note: Note,
    *,
    limits: Worker | None = None,
) -> None:
    """Add `num_rounds` figures of each work and engine to `samples`, and of the limits if there is
    a worker for them. The engines change their order from round to round.

    A peer that cannot do a work is named once and left out of that work. BenchError if we cannot.
    """
    missing: set[tuple[str, str]] = set()
    names = list(engines)
    for round_ in range(num_rounds):
        note(f"round {round_ + 1} of {num_rounds}")
        shift = round_ % len(names)
        for limit in LIMITS if limits is not None else ():
            assert limits is not None
            samples.limits[limit].append(limits.measure(limit)["per_second"])
        for work in works:
            for name in names[shift:] + names[:shift]:
                if (work.name, name) in missing:
                    continue
                try:
                    with busy_cpus() if work.is_beside_others else nullcontext():
                        figure, details = engines[name].figure(work)
                except BenchError as error:
                    if name == OURS:
                        raise
                    note(f"{error}: its rows are left out")
                    missing.add((work.name, name))
                    samples.drop(work.name, name)
                    continue
                samples.figures[work.name][name].append(figure)
                if details:
                    samples.details[work.name][name].append(details)
