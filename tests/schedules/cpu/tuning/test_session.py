"""The whole search over a small kernel. Times are the machine's, so tests decide themselves what
is faster."""

from dataclasses import replace

import pytest
from everycast.artifact.host import host_platform
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.cpu.linear_operator import LinearOperator
from everycast.schedules.cpu.packing import PackedWeight
from everycast.schedules.cpu.tuning import measure
from everycast.schedules.cpu.tuning.measure import CpuLab, OperatorBench
from everycast.schedules.cpu.tuning.records import tuned_schedule
from everycast.schedules.cpu.tuning.spaces import SPACES
from everycast.schedules.tuning.records import Record, Records
from everycast.schedules.tuning.search import Comparison
from everycast.schedules.tuning.session import tune
from everycast.targets.cpu import _export
from everycast.targets.linker import find_linker
from tvm import rpc

OPERATOR = LinearOperator(
    weights=(PackedWeight(TensorFormat("float16", 4, 32, 8), 32, 64),), biases=(True,), terms=1,
    residual=True,
)  # fmt: skip


def make_lab(lab, session=None):
    """One whose tiles are small, so that kernels compile fast."""
    isa = replace(lab.isa, num_registers=8)
    linker = find_linker(host_platform())
    return CpuLab(lab.target, isa, lambda built, path: _export(built, path, linker), session)


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch):
    monkeypatch.setattr(measure, "_FLUSH_BYTES", 4096)


@pytest.fixture
def rounds(monkeypatch):
    """No timing: whatever has larger values of its parameters is faster by a tenth."""
    made = []

    def kernel(self, schedule):
        made.append(schedule)
        return schedule

    def compare(self, before, after, rounds):
        def cost(s):
            tokens = s.tile_tokens * (1 + s.many_tokens)
            return 1 / (tokens * s.chunk_bytes * (1 + s.prefetch_many + s.prefetch_one))

        return Comparison((1.0,) * rounds, (cost(after) / cost(before),) * rounds)

    monkeypatch.setattr(CpuLab, "prepare", lambda self: None)
    monkeypatch.setattr(OperatorBench, "kernel", kernel)
    monkeypatch.setattr(OperatorBench, "compare", compare)
    monkeypatch.setattr(OperatorBench, "_results", lambda self, kernel: [])
    return made


def run(lab, records, *, trials=4, is_over=lambda: False, operators=(OPERATOR,)):
    events, kept = [], []
    tune(
        operators,
        lab,
        records,
        trials=trials,
        is_over=is_over,
        keep=lambda task, record: kept.append((task.bucket, record)),
        report=events.append,
    )
    return events, kept


def test_the_fastest_is_kept(lab, rounds):
    lab = make_lab(lab)
    records = Records("x")
    events, kept = run(lab, records, trials=1000)
    assert [bucket for bucket, _ in kept] == list(SPACES)
    found = {bucket: record.parameters for bucket, record in kept}
    largest = {name: values[-1] for name, values in SPACES["many"].items()}
    assert OPERATOR.default_schedule(lab.isa).many_tokens == largest.pop("many_tokens")
    assert found == {"many": largest, "few": {}, "one": {"prefetch_one": 16384}}
    assert [e.kind for e in events if e.kind != "trial"] == ["done"] * 3
    assert tuned_schedule(records, OPERATOR, lab.isa).tile_tokens == 16
    assert all(record.tuned_us <= record.default_us for _, record in kept)


def test_what_has_enough_trials_is_skipped(lab, rounds):
    lab = make_lab(lab)
    records = Records("x")
    run(lab, records)
    made = len(rounds)
    events, kept = run(lab, records)
    assert [event.kind for event in events] == ["skip"] * 3 and not kept and len(rounds) == made
    events, kept = run(lab, records, trials=5)  # one more each
    assert [record.trials for _, record in kept] == [5, 5, 5]
    assert len([e for e in events if e.kind == "trial"]) == 6


def test_going_on_starts_from_what_was_found(lab, rounds):
    lab = make_lab(lab)
    found = {"tile_tokens": 16, "chunk_bytes": 1 << 21, "prefetch_many": 16384}
    records = Records("x", {OPERATOR.name: {"many": Record(found, 1, 10.0, 5.0)}})
    _, kept = run(lab, records, trials=2)
    assert kept[0] == ("many", Record(found, 2, *kept[0][1].__getstate__()[2:]))


@pytest.mark.parametrize("num_trials", [0, 2])
def test_time_that_is_over_ends_a_task_with_what_it_has(lab, rounds, num_trials):
    ticks = iter([False] * (num_trials + 1))
    _, kept = run(make_lab(lab), Records("x"), is_over=lambda: next(ticks, True))
    assert [record.trials for _, record in kept] == ([2] if num_trials else [])


def test_ctrl_c_keeps_what_is_finished(lab, rounds, monkeypatch):
    lab, kept = make_lab(lab), []

    def report(event):
        if event.task.bucket == "few":
            raise KeyboardInterrupt

    records = Records("x")
    with pytest.raises(KeyboardInterrupt):
        tune([OPERATOR], lab, records, trials=2, is_over=lambda: False,
             keep=lambda task, record: kept.append(task.bucket), report=report)  # fmt: skip
    assert kept == ["many"] == list(records.operators[OPERATOR.name])


def test_wrong_results_are_never_kept(lab, rounds, monkeypatch):
    monkeypatch.setattr(OperatorBench, "is_right", lambda self, kernel: False)
    _, kept = run(make_lab(lab), Records("x"), trials=50)
    assert all(record.parameters == {} for _, record in kept)


def test_small_tiles_have_no_tiles_between(lab):
    tiny = replace(make_lab(lab), isa=replace(lab.isa, num_registers=4))
    assert [task.bucket for task in tiny.tasks(OPERATOR, Records("x"))] == ["many", "one"]


def check_bench(lab):
    bench = OperatorBench(lab, OPERATOR, 1)
    default = OPERATOR.default_schedule(lab.isa)
    kernel = bench.kernel(default.with_parameters({"prefetch_one": 1024}))
    assert bench.is_right(kernel)
    other = replace(OPERATOR, residual=False)
    comparison = bench.compare(bench.default, kernel, 3)
    assert len(comparison.before) == len(comparison.after) == 3
    assert min(*comparison.before, *comparison.after) > 0
    return bench, other


def test_kernels_run_and_are_compared_to_the_bit(lab):
    bench, _ = check_bench(make_lab(lab))
    bench._expected[-1].view("int32")[-1, -1] ^= 1
    assert not bench.is_right(bench.default)


def test_through_an_rpc_tracker(lab):
    for package in ("tornado", "cloudpickle", "psutil"):
        pytest.importorskip(package, reason=f"TVM's RPC tracker needs {package}")
    from tvm.rpc.server import Server
    from tvm.rpc.tracker import Tracker

    tracker = Tracker("127.0.0.1", port=19190, port_end=19290, silent=True)
    address = ("127.0.0.1", tracker.port)
    server = Server(
        "127.0.0.1", port=19300, port_end=19400, key="board", tracker_addr=address, silent=True
    )
    try:
        session = rpc.connect_tracker(*address).request("board", session_timeout=60)
        remote = make_lab(lab, session)
        remote.prepare()
        check_bench(remote)
    finally:
        server.terminate()
        tracker.terminate()
