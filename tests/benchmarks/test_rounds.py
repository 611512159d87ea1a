"""Rounds over scripted engines: order, what is left out, and what is never left out."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from everycast.benchmarks.fresh_process import FreshCommand, FreshWorker
from everycast.benchmarks.rounds import LoadedEngine, run_rounds
from everycast.benchmarks.samples import OURS, Samples
from everycast.benchmarks.workers import BenchError, Worker, WorkerError, WorkRefusedError
from everycast.benchmarks.works import Work, parse_work

DECODE, PREFILL = parse_work("decode"), parse_work("prefill_128")


class Scripted:
    """An engine whose figures are given; None is a work that it cannot do."""

    def __init__(self, name: str, calls: list[str], figures: list[float | None]) -> None:
        self.name, self.calls, self.figures = name, calls, iter(figures)

    def figure(self, work: Work) -> tuple[float, dict[str, float]]:
        self.calls.append(f"{work.name} {self.name}")
        figure = next(self.figures)
        if figure is None:
            raise WorkRefusedError(f"{self.name} cannot do {work.name}")
        return figure, {"p50": figure / 10}


def test_engines_take_turns_and_change_their_order() -> None:
    calls: list[str] = []
    names = [OURS, "a", "b"]
    engines = {name: Scripted(name, calls, [1, 2, 3]) for name in names}
    samples = Samples()
    run_rounds(engines, [DECODE], 3, samples, lambda text: None)
    orders = [[call.split()[1] for call in calls[i : i + 3]] for i in (0, 3, 6)]
    assert orders == [[OURS, "a", "b"], ["a", "b", OURS], ["b", OURS, "a"]]
    assert samples.figures["decode"] == {name: [1, 2, 3] for name in names}
    assert samples.details["decode"]["a"] == [{"p50": 0.1}, {"p50": 0.2}, {"p50": 0.3}]


def test_a_peer_without_a_work_is_named_once_and_left_out_of_it() -> None:
    calls: list[str] = []
    notes: list[str] = []
    engines = {
        OURS: Scripted(OURS, calls, [1, 1, 2, 2, 3, 3]),
        "a": Scripted("a", calls, [5, 6, 5, None, 5]),
    }
    samples = Samples()
    run_rounds(engines, [DECODE, PREFILL], 3, samples, notes.append)
    assert samples.figures["decode"]["a"] == [5, 5, 5]
    assert "a" not in samples.figures["prefill_128"]
    assert samples.figures["prefill_128"][OURS] == [1, 2, 3]
    assert [note for note in notes if "cannot" in note] == [
        "a cannot do prefill_128: its rows are left out"
    ]
    assert calls.count("prefill_128 a") == 2


def test_our_own_failure_is_no_note() -> None:
    engines = {OURS: Scripted(OURS, [], [1, None])}
    samples = Samples()
    with pytest.raises(BenchError, match="everycast cannot do decode"):
        run_rounds(engines, [DECODE], 2, samples, lambda text: None)
    assert samples.figures["decode"][OURS] == [1]


WORKER = """
import sys
print('{}', flush=True)
for line in sys.stdin:
    if "prefill" in line: sys.exit("failed: too long")
    print('{"tokens": 30, "seconds": 1.5, "per_second": 7.0}', flush=True)
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start() -> Worker:
    return Worker("w", [sys.executable, "-c", WORKER])


def test_a_worker_that_ends_in_one_work_comes_back_for_the_next(stack: ExitStack) -> None:
    engine = LoadedEngine(start, stack)
    first = engine.worker
    assert engine.figure(DECODE) == (20.0, {})
    with pytest.raises(WorkerError, match="failed: too long"):
        engine.figure(PREFILL)
    assert engine.figure(DECODE) == (20.0, {})
    assert engine.worker is not first


def test_limits_are_measured_in_every_round(stack: ExitStack) -> None:
    samples = Samples()
    limits = stack.enter_context(start())
    engines = {OURS: LoadedEngine(start, stack)}
    run_rounds(engines, [DECODE], 2, samples, lambda text: None, limits=limits)
    assert samples.limits == {"read": [7.0, 7.0], "multiply": [7.0, 7.0]}


def test_fresh_workers() -> None:
    seconds, details = FreshWorker(start).figure(parse_work("start"))
    assert seconds > 0 and details == {}
    megabytes, details = FreshWorker(start).figure(parse_work("memory"))
    assert 1 < megabytes < 200 and 0 < details["pss_mb"] <= megabytes


def test_a_fresh_command_is_timed_to_its_first_byte() -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['X'])"]
    assert FreshCommand("us", command, {"X": "1"}).figure(parse_work("start"))[0] > 0
    with pytest.raises(BenchError, match=r"us wrote no token: .*KeyError"):
        FreshCommand("us", command, {}).figure(parse_work("start"))


def test_only_a_work_beside_others_has_others_and_they_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: list[bool] = []

    class Looking:
        def figure(self, work: Work) -> tuple[float, dict[str, float]]:
            running.extend(process.poll() is None for process in started)
            return 1.0, {}

    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, command: list[str]) -> None:
            super().__init__(command)
            started.append(self)

    monkeypatch.setattr("everycast.benchmarks.busy_cpus.subprocess.Popen", Popen)
    run_rounds({OURS: Looking()}, [DECODE], 1, Samples(), lambda text: None)
    assert not started
    run_rounds({OURS: Looking()}, [parse_work("decode_busy")], 1, Samples(), lambda text: None)
    assert running == [True] * len(os.sched_getaffinity(0))
    assert all(process.poll() is not None for process in started)
