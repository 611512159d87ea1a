"""Tune operators one after another; what is finished is kept, so that it can go on later."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from .records import Record, Records
from .search import Comparison, Parameters, Search, Space

_TRIAL_ROUNDS = 9
_FINAL_ROUNDS = 25


class NamedOperator(Protocol):
    """What records are kept for."""

    @property
    def name(self) -> str: ...


Op = TypeVar("Op", bound=NamedOperator)


@dataclass(frozen=True, slots=True)
class Task(Generic[Op]):
    """What one record is for: an operator, and a bucket of batch sizes."""

    operator: Op
    bucket: str


@dataclass(frozen=True, slots=True)
class TuneEvent:
    """Where the tuning of a task is; `speedup` of the best found so far over the default."""

    kind: Literal["skip", "trial", "done"]
    task: Task[Any]
    trials: int
    total_trials: int
    speedup: float = 1.0


class Bench(Protocol):
    """A task's kernels and their times. `known` is what is known of the operator's others.

    `default` and `start` are the bucket's parameters without records and with them.
    """

    default: Parameters
    start: Parameters

    def kernel(self, parameters: Parameters) -> Any:
        """Compiled; None where the device or the target cannot have it."""

    def is_right(self, kernel: Any) -> bool:
        """Whether its results are the default's."""

    def compare(self, before: Any, after: Any, rounds: int) -> Comparison:
        """Both in turn, the one or the other first."""


class Lab(Protocol[Op]):
    """Where kernels are compiled and run."""

    def prepare(self) -> None:
        """Called once, before anything is measured."""

    def tasks(self, operator: Op, known: Records) -> Sequence[Task[Op]]:
        """In order: what is found for one may decide what the next ones are."""

    def space(self, task: Task[Op]) -> tuple[Space, Sequence[Parameters]]:
        """The parameters' values, and the candidates among their combinations, the default one of
        them."""

    def bench(self, task: Task[Op], known: Records) -> Bench: ...


def tune(
    operators: Sequence[Op],
    lab: Lab[Op],
    known: Records,
    *,
    trials: int,
    is_over: Callable[[], bool],
    keep: Callable[[Task[Op], Record], None],
    report: Callable[[TuneEvent], None],
) -> None:
    """Tune every operator for every bucket, with at most `trials` candidates for each.

    `known` are records to start from; those with enough trials are skipped. `keep` gets each new
    record as soon as it is there. After `is_over` the running task is ended with what it has.
    """
    lab.prepare()
    for operator in operators:
        done: set[str] = set()
        while (task := _next_task(lab, operator, known, done)) is not None:
            done.add(task.bucket)
            if is_over():
                return
            record = known.find(operator.name, task.bucket)
            space, candidates = lab.space(task)
            total = min(trials, len(candidates) - 1)
            if record is not None and record.trials >= total:
                report(TuneEvent("skip", task, record.trials, total, record.speedup))
                continue
            new = _tune_task(task, lab, known, space, candidates, total, is_over, report)
            if new is None:
                return
            known.add(operator.name, task.bucket, new)
            keep(task, new)
            report(TuneEvent("done", task, new.trials, total, new.speedup))


def _next_task(lab: Lab[Op], operator: Op, known: Records, done: set[str]) -> Task[Op] | None:
    return next((task for task in lab.tasks(operator, known) if task.bucket not in done), None)


def _tune_task(
    task: Task[Op],
    lab: Lab[Op],
    known: Records,
    space: Space,
    candidates: Sequence[Parameters],
    total: int,
    is_over: Callable[[], bool],
    report: Callable[[TuneEvent], None],
) -> Record | None:
    """The task's record; None if there was no time for a trial."""
    bench = lab.bench(task, known)
    before = known.find(task.operator.name, task.bucket)
    done = before.trials if before is not None else 0
    seed = f"{task.operator.name} {task.bucket} {done}"
    search = Search(space, candidates, bench.start, seed)
    plain = bench.kernel(bench.default)
    best = plain
    if bench.start != bench.default:
        best = bench.kernel(bench.start)
    speedup = before.speedup if before is not None else 1.0
    made = 0
    report(TuneEvent("trial", task, done, total, speedup))
    while done + made < total and not is_over():
        candidate = search.propose()
        if candidate is None:
            break
        made += 1
        kernel = bench.kernel(candidate)
        if kernel is not None and bench.is_right(kernel):
            comparison = bench.compare(best, kernel, _TRIAL_ROUNDS)
            if comparison.is_faster:
                search.best, best = candidate, kernel
                speedup /= comparison.ratio
        report(TuneEvent("trial", task, done + made, total, speedup))
    if not made:
        return None
    return _final_record(bench, plain, best, search.best, done + made)


def _final_record(
    bench: Bench, plain: Any, best: Any, parameters: Parameters, trials: int
) -> Record:
    """The best against the default, once more and longer; with what is not the default's."""
    if best is not plain:
        comparison = bench.compare(plain, best, _FINAL_ROUNDS)
        if comparison.is_faster:
            changed = {k: v for k, v in parameters.items() if v != bench.default[k]}
            return Record(changed, trials, *comparison.microseconds())
    before, _ = bench.compare(plain, plain, _TRIAL_ROUNDS).microseconds()
    return Record({}, trials, before, before)
