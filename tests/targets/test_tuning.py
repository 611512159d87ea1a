"""From a checkpoint to records, with a search that measures nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from everycast.artifact import tuning as folders
from everycast.artifact.errors import CompileError, EverycastError, RequestError
from everycast.artifact.tuning import TunedDevice
from everycast.schedules.cpu.tuning.records import check_parameters as check_cpu
from everycast.schedules.gpu.linear_schedule import check_parameters as check_gpu
from everycast.schedules.tuning.records import Record, read_records
from everycast.schedules.tuning.session import Task, TuneEvent
from everycast.targets import tuning
from everycast.targets.build import BuildRequest, open_source
from everycast.targets.gpu import tuned_for
from everycast.targets.library import export_graph
from everycast.targets.target import find_target
from everycast.targets.tuning import TuneRequest, Tuning

RECORD = Record({"prefetch_one": 2048}, 3, 10.0, 9.0)
GPU_RECORD = Record({"gemv_lanes": 8}, 3, 10.0, 9.0)
DEVICE = TunedDevice("vulkan", 0, None, "vulkan:0 (a device)", "vulkan-a-device-0")


@pytest.fixture
def request_(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneRequest:
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
    return TuneRequest(str(tiny_checkpoint), "cpu", "q4f16_1", "auto", None, 3, None)


def prepare(request: TuneRequest) -> Tuning:
    return Tuning(request, lambda done, total: None)


def fake_search(stop_after: int | None = None, record: Record = RECORD) -> Callable[..., None]:
    """Finds `record` for one token of every operator; Ctrl-C after some."""

    def tune(
        operators: Any, lab: Any, known: Any, *, trials: int, is_over: Any, keep: Any, report: Any
    ) -> None:
        bucket = "one"
        for number, operator in enumerate(operators):
            if number == stop_after:
                raise KeyboardInterrupt
            task: Task[Any] = Task(operator, bucket)
            if known.find(operator.name, bucket) is not None:
                report(TuneEvent("skip", task, 3, trials))
                continue
            keep(task, record)
            report(TuneEvent("done", task, 3, trials, 10 / 9))

    return tune


def test_stopped_and_resumed(request_: TuneRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tune", fake_search(stop_after=2))
    first = prepare(request_)
    with pytest.raises(KeyboardInterrupt):
        first.run(lambda event: None)
    assert len(read_records(first.file, first.device, check_cpu).operators) == 2
    monkeypatch.setattr(tuning, "tune", fake_search())
    events: list[TuneEvent] = []
    second = prepare(request_)
    result = second.run(events.append)
    assert result.num_skipped == 2
    assert len(result.new) == len(second.operators) - 2 == len(events) - 2
    stored = read_records(result.file, second.device, check_cpu).operators
    assert set(stored) == {operator.name for operator in second.operators}


def test_lowering_applies_the_records_and_counts(
    request_: TuneRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = BuildRequest(request_.model, "cpu", "q4f16_1", Path())
    source = open_source(asked, lambda *_: None)
    graph = export_graph(source.config, source.plan.formats, "float16")

    def schedules() -> dict[str, int]:
        return find_target("cpu").lower(*graph).schedules

    before = schedules()
    assert before["tuned"] == 0 and before["hand"] > 10
    monkeypatch.setattr(tuning, "tune", fake_search())
    chosen = prepare(replace(request_, operator="gated_mlp"))
    assert len(chosen.operators) == 1
    chosen.run(lambda event: None)
    after = schedules()
    assert after["tuned"] == 2  # one for each layer
    assert after["tuned"] + after["hand"] == before["hand"]
    assert after["default"] == before["default"]


def find_vulkan() -> Any:
    try:
        return find_target("vulkan")
    except CompileError as error:
        pytest.skip(str(error))


def test_lowering_for_a_gpu_applies_the_records_of_its_device(
    request_: TuneRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one: nothing runs, and nothing is measured."""
    target = find_vulkan()
    source = open_source(BuildRequest(request_.model, "vulkan", "q4f16_1", Path()), lambda *_: None)
    graph = export_graph(source.config, source.plan.formats, "float16")
    before = target.lower(*graph).schedules
    assert before["tuned"] == 0 and before["default"] == 0
    monkeypatch.setattr(tuning, "tune", fake_search(record=GPU_RECORD))
    # Of two layers: q, k and v are kernels of one operator.
    for operator, num_tuned in (("silu", 2), ("", 2 + 4 + 2 + 1)):
        run = prepare(replace(request_, target="vulkan", device=DEVICE, operator=operator))
        result = run.run(lambda event: None)
        assert result.file.name == "vulkan-a-device-0.json"
        assert result.num_skipped == (operator == "")
        after = tuned_for(target, DEVICE.name).lower(*graph).schedules
        assert after["tuned"] == num_tuned
        assert after["tuned"] + after["hand"] == before["hand"]
    assert read_records(result.file, DEVICE.name, check_gpu).operators
    assert tuned_for(target, "vulkan-another").lower(*graph).schedules == before


def test_shipped_records_can_be_read() -> None:
    for path in folders.SHIPPED.glob("*.json"):
        is_gpu = path.stem.partition("-")[0] in ("vulkan", "cuda", "rocm", "metal", "opencl")
        assert read_records(path, path.stem, check_gpu if is_gpu else check_cpu).operators


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": "webgpu"}, RequestError, "webgpu run in browsers"),
        ({"target": "vulkan", "rpc": "h:1", "device_key": "k"}, RequestError, "only the CPU can"),
        ({"operator": "nothing"}, RequestError, r"'nothing'; the model has .*linears"),
        ({"target": "cpu:cortex-a76"}, CompileError, "does not run on this machine.*--rpc"),
        ({"rpc": "somewhere"}, RequestError, "HOST:PORT"),
        ({"device_key": "board"}, RequestError, "--rpc HOST:PORT"),
        ({"rpc": "127.0.0.1:1", "device_key": "board"}, CompileError, "no RPC tracker answers"),
    ],
)
def test_what_cannot_be_tuned(
    request_: TuneRequest, change: dict[str, Any], error: type[EverycastError], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare(replace(request_, **change))
