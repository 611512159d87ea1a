"""What `everycast tune` prints, over a run that measures nothing."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from everycast import cli, tune_command, tuned_devices
from everycast.artifact.errors import ArtifactError
from everycast.artifact.tuning import TunedDevice
from everycast.schedules.tuning.records import Record
from everycast.schedules.tuning.session import TuneEvent
from everycast.targets import tuning
from everycast.targets.tuning import TuneRequest, TuneResult

FASTER = Record({"tile_tokens": 16}, 24, 1100.0, 1000.0)
AS_BEFORE = Record({}, 5, 30.0, 30.0)
TASK: Any = SimpleNamespace(operator=SimpleNamespace(name="linears-a"), bucket="many")
EVENTS = [
    TuneEvent("skip", TASK, 24, 24, 1.05),
    TuneEvent("trial", TASK, 1, 24),
    TuneEvent("done", TASK, 24, 24, 1.1),
]


class FakeTuning:
    """Notes what was asked for; `run` gives two records, or is interrupted."""

    requests: list[TuneRequest]
    is_interrupted = False

    def __init__(self, request: TuneRequest, progress: Callable[[int, int], None]) -> None:
        FakeTuning.requests.append(request)
        self.operators, self.label, self.file = [1, 2], "znver4-0", Path("/cache/znver4-0.json")

    def run(self, report: Callable[[TuneEvent], None]) -> TuneResult:
        for event in EVENTS:
            report(event)
        if self.is_interrupted:
            raise KeyboardInterrupt
        new = (("linears-a", "many", FASTER), ("linears-a", "one", AS_BEFORE))
        return TuneResult(self.file, new, 1)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTuning, "requests", [], raising=False)
    monkeypatch.setattr(tuning, "Tuning", FakeTuning)


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["tune", *arguments])
    return stop.value.code


def test_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("my model", "--minutes", "2", "--operator", "linears", "-q", "q4f16_1") == 0
    (request,) = FakeTuning.requests
    assert (request.model, request.minutes, request.operator) == ("my model", 2.0, "linears")
    assert request.trials == 24
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "linears-a  many  1100.0 → 1000.0 µs (+10.0 %)  tile_tokens=16",
        "linears-a  one   30.0 µs  default is the fastest of 6",
    ]
    assert "linears-a many: tuned before, best +5.0 %" in err
    assert "linears-a many: 24 trials, best +10.0 %" in err
    assert "1 of 2 faster than the default, 1 tuned before; kept in /cache/znver4-0.json" in err
    assert "next: everycast compile 'my model' --target cpu -q q4f16_1" in err


def test_a_device_is_found_and_handed_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = TunedDevice("vulkan", 1, None, "vulkan:1 (llvmpipe)", "vulkan-llvmpipe-0")
    asked: list[tuple[str, str | None]] = []

    def find(target: str, device: str | None) -> TunedDevice:
        asked.append((target, device))
        return found

    monkeypatch.setattr(tuned_devices, "device_to_tune", find)
    assert run("m", "--target", "vulkan", "--device", "vulkan:1") == 0
    (request,) = FakeTuning.requests
    assert request.device == found and asked == [("vulkan", "vulkan:1")]
    assert "next: everycast compile m --target vulkan --device vulkan:1" in capsys.readouterr().err


def test_no_device_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(target: str, device: str | None) -> TunedDevice:
        raise ArtifactError("cannot run on cuda: no driver")

    monkeypatch.setattr(tuned_devices, "device_to_tune", find)
    assert run("m", "--target", "cuda") == 2
    assert capsys.readouterr().err == "error: cannot run on cuda: no driver\n"
    assert not FakeTuning.requests


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("m", "--json") == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["skipped"] == 1 and err == ""
    assert answer["records"][0] == {
        "operator": "linears-a", "bucket": "many", "parameters": {"tile_tokens": 16},
        "trials": 24, "default_us": 1100.0, "tuned_us": 1000.0,
    }  # fmt: skip


def test_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTuning, "is_interrupted", True)
    assert run("m") == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "stopped; /cache/znver4-0.json keeps what is finished, the same command goes on" in err


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with tune_command.TuneView(3.0, quiet=False) as view:
        for event in EVENTS:
            view.report(event)
    seen = terminal.getvalue()
    assert "24/24" in seen and "+10.0 %" in seen and "min left" in seen


@pytest.mark.parametrize("wrong", [["--trials", "0"], ["--minutes", "0"]])
def test_wrong_options(wrong: list[str]) -> None:
    assert run("m", *wrong) == 2
    assert not FakeTuning.requests
