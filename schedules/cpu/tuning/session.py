"""Tune operators one after another; what is finished is kept, so that it can go on later."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..isa import CpuIsa
from ..linear_operator import LinearOperator
from ..linear_schedule import Bucket
from .measure import Kernel, Lab, OperatorBench
from .records import Record, Records
from .search import SPACES, Search, bucket_parameters, num_candidates

_TRIAL_ROUNDS = 9
_FINAL_ROUNDS = 25
MANY_TOKENS = 256
"""Batch that the largest tiles are timed with."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one record is for."""

    operator: LinearOperator
    bucket: Bucket
    num_tokens: int
    """Of the batch that is timed."""


@dataclass(frozen=True, slots=True)
class TuneEvent:
    """Where the tuning of a task is; `speedup` of the best found so far over the default."""

    kind: Literal["skip", "trial", "done"]
    task: Task
    trials: int
    total_trials: int
    speedup: float = 1.0


def tasks_of(operator: LinearOperator, isa: CpuIsa, records: Records) -> list[Task]:
    """The operator's tasks, in order: `many` decides which tiles there are for a few tokens."""
    largest = records.schedule(operator, isa).tile_tokens
    sizes: dict[Bucket, int] = {"many": MANY_TOKENS, "few": largest - 2, "one": 1}
    return [Task(operator, bucket, sizes[bucket]) for bucket in SPACES if sizes[bucket] > 0]


def tune(
    operators: Sequence[LinearOperator],
    lab: Lab,
    known: Records,
    *,
    trials: int,
    is_over: Callable[[], bool],
    keep: Callable[[Task, Record], None],
    report: Callable[[TuneEvent], None],
) -> None:
    """Tune every operator for every bucket, with at most `trials` candidates for each.

    `known` are records to start from; those with enough trials are skipped. `keep` gets each new
    record as soon as it is there. After `is_over` the running task is ended with what it has.
    """
    lab.use_one_thread()
    for operator in operators:
        for bucket in SPACES:
            tasks = {task.bucket: task for task in tasks_of(operator, lab.isa, known)}
            if bucket not in tasks:
                continue
            if is_over():
                return
            record = known.find(operator, bucket)
            total = min(trials, num_candidates(SPACES[bucket]) - 1)
            if record is not None and record.trials >= total:
                report(TuneEvent("skip", tasks[bucket], record.trials, total, _speedup(record)))
                continue
            new = _tune_task(tasks[bucket], lab, known, total, is_over, report)
            if new is None:
                return
            known.add(operator, bucket, new)
            keep(tasks[bucket], new)
            report(TuneEvent("done", tasks[bucket], new.trials, total, _speedup(new)))


def _speedup(record: Record) -> float:
    return record.default_us / record.tuned_us


def _tune_task(
    task: Task,
    lab: Lab,
    known: Records,
    total: int,
    is_over: Callable[[], bool],
    report: Callable[[TuneEvent], None],
) -> Record | None:
    """The task's record; None if there was no time for a trial."""
    operator, bucket = task.operator, task.bucket
    bench = OperatorBench(lab, operator, task.num_tokens)
    before = known.find(operator, bucket)
    schedule = known.schedule(operator, lab.isa)
    done = before.trials if before is not None else 0
    search = Search(bucket, bucket_parameters(schedule, bucket), f"{operator.name} {bucket} {done}")
    default = bucket_parameters(operator.default_schedule(lab.isa), bucket)
    # The default of this bucket, beside what other buckets have.
    plain = bench.kernel(schedule.with_parameters(default))
    best = bench.kernel(schedule) if search.best != default else plain
    speedup = _speedup(before) if before is not None else 1.0
    made = 0
    report(TuneEvent("trial", task, done, total, speedup))
    while done + made < total and not is_over():
        candidate = search.propose()
        if candidate is None:
            break
        made += 1
        kernel = bench.kernel(schedule.with_parameters(candidate))
        if bench.is_right(kernel):
            comparison = bench.compare(best, kernel, _TRIAL_ROUNDS)
            if comparison.is_faster:
                search.best, best = candidate, kernel
                speedup /= comparison.ratio
        report(TuneEvent("trial", task, done + made, total, speedup))
    if not made:
        return None
    return _final_record(bench, plain, best, search.best, done + made)


def _final_record(
    bench: OperatorBench, plain: Kernel, best: Kernel, parameters: dict[str, int], trials: int
) -> Record:
    """The best against the default, once more and longer."""
    if best is not plain:
        comparison = bench.compare(plain, best, _FINAL_ROUNDS)
        if comparison.is_faster:
            return Record(parameters, trials, *comparison.microseconds())
    before, _ = bench.compare(plain, plain, _TRIAL_ROUNDS).microseconds()
    return Record({}, trials, before, before)
