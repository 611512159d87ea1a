"""`everycast bench` from options to file, over scripted workers."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from everycast.artifact.errors import ArtifactError
from everycast.benchmarks import command
from everycast.benchmarks.bench_model import BenchModel
from everycast.benchmarks.engines import Installed, Line
from everycast.benchmarks.options import parse_options
from everycast.benchmarks.peers import find_peer
from everycast.benchmarks.workers import BenchError, Worker

WORKER = """
import sys
print('{"activations": "int8", "bytes_per_token": 1000, "kv_bytes_per_token": 1}', flush=True)
for line in sys.stdin:
    work = line.strip()
    if work in "%s".split(","): sys.exit("failed: " + work)
    print('{"tokens": %d, "seconds": 1, "per_second": 1e6}', flush=True)
"""


def worker(name: str, tokens: int, *, dies: str = "-") -> Worker:
    return Worker(name, [sys.executable, "-c", WORKER % (dies, tokens)])


class Stage:
    """What stands in for the compiler, the engine and the peers."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.json = tmp_path / "bench.json"
        self.compiled: list[tuple[str, str]] = []
        self.ours = lambda: worker("everycast", 20)
        self.peer = lambda: worker("llama.cpp", 10)
        model = BenchModel("m", tmp_path / "m.gguf", 4.6, 400, 100)
        python = Path(sys.executable)
        monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("everycast.benchmarks.workers.REST_S", 0.0)
        monkeypatch.setattr(command, "DeviceMemory", self.open_device)
        monkeypatch.setattr(command, "prepare_gguf", lambda name, folder, note: model)
        monkeypatch.setattr(command, "compile_for", self.compile)
        monkeypatch.setattr(command, "read_manifest", lambda path: SimpleNamespace(
            weights=SimpleNamespace(bits_per_weight=4.5)))  # fmt: skip
        monkeypatch.setattr(
            command,
            "install",
            lambda peers, *_, **__: [Installed(find_peer("llama.cpp"), python) for _ in peers],
        )
        monkeypatch.setattr(Line, "ours", lambda line, works: self.ours)
        monkeypatch.setattr(Line, "limits", lambda line: worker("limits", 0))
        monkeypatch.setattr(Line, "_peer_worker", lambda line, installed, variant: self.peer)

    def open_device(self, name: str) -> None:
        if name == "cuda":
            raise ArtifactError("cannot run on cuda: no driver")

    def compile(self, model: BenchModel, activations: str, target: str, *_: Any) -> Path:
        self.compiled.append((activations, target))
        return Path("artifact")

    def bench(self, **changes: Any) -> None:
        options = {
            "shape": None, "against": "llama.cpp", "threads": "1", "works": "decode,prefill_128",
            "rounds": 3, "activations": "auto", "peer_isa": "native", "peer_python": [],
            "json": self.json, "plot": None,
        }  # fmt: skip
        command.run_bench(parse_options("m", **{**options, **changes}))

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.json.read_text())["rows"]
        return rows


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


Captured = pytest.CaptureFixture[str]


def test_rows_table_and_file(stage: Stage, capsys: Captured) -> None:
    stage.bench(activations="auto,int8", peer_isa="avx2")
    assert stage.compiled == [("auto", "cpu:x86-64-v3"), ("int8", "cpu:x86-64-v3")]
    rows = stage.rows()
    assert [row["work"] for row in rows] == ["decode", "prefill_128"] * 2
    for row in rows:
        assert (row["ours"], row["theirs"], row["ratio"], row["rounds"]) == (20, 10, 2, 3)
        assert (row["peer"], row["isa"], row["activations"]) == ("llama.cpp", "avx2", "int8")
        assert row["percent_of_limit"] > 0 and row["bits_per_weight"] == 4.5
    out, err = capsys.readouterr()
    assert out.count("| decode |") == 2 and "**2.00**" in out
    assert f"rows and samples are in {stage.json}" in err and "next: " in err


def test_alone_it_says_how_to_compare(stage: Stage, capsys: Captured) -> None:
    stage.bench(against=None)
    assert [row["peer"] for row in stage.rows()] == [None, None]
    assert "--against llama.cpp" in capsys.readouterr().err


def test_on_another_device_there_are_no_limits_of_the_cpu(stage: Stage) -> None:
    stage.bench(against=None, device="vulkan:1")
    assert stage.compiled == [("auto", "vulkan")]
    (row, *_) = stage.rows()
    assert row["isa"] == "vulkan:1" and row["percent_of_limit"] is None


def test_nothing_is_compiled_for_a_device_that_is_not_there(stage: Stage) -> None:
    with pytest.raises(ArtifactError, match="cannot run on cuda: no driver"):
        stage.bench(against=None, device="cuda")
    assert stage.compiled == []


def test_a_peer_that_fails_a_work_keeps_the_others(stage: Stage, capsys: Captured) -> None:
    stage.peer = lambda: worker("llama.cpp", 10, dies="prefill_128")
    stage.bench()
    assert [(row["work"], row["peer"]) for row in stage.rows()] == [
        ("decode", "llama.cpp"),
        ("prefill_128", None),
    ]
    err = capsys.readouterr().err
    assert "failed: prefill_128: its rows are left out" in err and "Traceback" not in err


def test_a_peer_that_does_not_start(stage: Stage, capsys: Captured) -> None:
    stage.peer = lambda: Worker("llama.cpp", [sys.executable, "-c", "raise SystemExit('no lib')"])
    stage.bench()
    assert [row["peer"] for row in stage.rows()] == [None, None]
    assert "no lib: its rows are left out" in capsys.readouterr().err


def test_memory_is_of_fresh_processes(stage: Stage) -> None:
    stage.bench(works="memory,decode")
    assert [row["work"] for row in stage.rows()] == ["decode", "memory"]
    memory = stage.rows()[1]
    assert memory["unit"] == "MB" and 0.5 < memory["ratio"] < 2 and memory["details"]["pss_mb"] > 0


def test_ctrl_c_keeps_what_was_measured(
    stage: Stage, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure: Callable[..., dict[str, Any]] = Worker.measure
    count = 0

    def stop(self: Worker, work: str, **options: float) -> dict[str, Any]:
        nonlocal count
        count += work == "prefill_128"
        if count == 5:  # three engines: in the second round
            raise KeyboardInterrupt
        return measure(self, work, **options)

    monkeypatch.setattr(Worker, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        stage.bench()
    decode, prefill = stage.rows()
    assert (decode["rounds"], decode["ratio"]) == (2, 2)
    assert (prefill["work"], prefill["ratio"]) == ("prefill_128", 2)
    assert "| decode |" in capsys.readouterr().out


def test_our_own_failure_keeps_what_was_measured(stage: Stage) -> None:
    stage.ours = lambda: worker("everycast", 20, dies="batch_2")
    with pytest.raises(BenchError, match="failed: batch_2"):
        stage.bench(works="decode,batch_2")
    assert [(row["work"], row["rounds"]) for row in stage.rows()] == [("decode", 1)]
