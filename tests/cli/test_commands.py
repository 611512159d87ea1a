"""Help, and the commands that neither chat nor serve."""

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_machine import FakeMachine, Run

COMMANDS = (
    "convert", "compile", "chat", "serve", "web", "list", "rm", "perplexity", "bench", "tune",
    "inspect", "doctor",
)  # fmt: skip


def test_help_of_every_command_has_an_example(run: Run) -> None:
    text = run("--help").out
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", text, re.MULTILINE)
        result = run(command, "--help")
        assert result.code == 0 and f"Example: everycast {command}" in result.out


def test_version(run: Run) -> None:
    from everycast import __version__

    assert run("--version").out == f"everycast {__version__}\n"


def test_help_imports_neither_engine_nor_compiler_nor_server() -> None:
    script = (
        "import sys; from everycast import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = 'numpy rich tvm tvm_ffi fastapi pydantic tokenizers jinja2'.split()\n"
        "print('loaded:', *(set(heavy) & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/"
    )
    assert result.stdout.splitlines()[-1] == "loaded:"


def test_compile_prints_the_path_and_the_next_command(run: Run, machine: FakeMachine) -> None:
    result = run("compile", "./x y", "-q", "q0f32", "-o", "out put", "--activations", "int8")
    path = Path("out put") / "m-q4f16_1"
    assert result.out == f"{path}\n"
    assert f"next: everycast chat '{path}'" in result.err
    assert machine.builds[0]["activations"] == "int8"
    as_json = json.loads(run("compile", "m", "--json").out)
    assert as_json["quantization"] == "q4f16_1" and as_json["bits_per_weight"] == 4.5


def test_convert_writes_no_library(run: Run, machine: FakeMachine) -> None:
    result = run("convert", "m")
    assert machine.builds[0]["target"] is None
    assert "next: everycast compile m" in result.err


def test_list_and_rm(run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    run("compile", "m", "--json")
    run("chat", "smollm2-135m", "--prompt", "a", "--json")
    record = json.loads(run("list", "--json").out)
    in_cache, in_dist = record["built"]
    assert in_cache["model"] == "smollm2-135m" and in_cache["targets"] == ["cpu"]
    assert in_dist["path"] == "dist/m-q4f16_1" and in_dist["bits_per_weight"] == 4.5
    assert "smollm2-135m" in {known["name"] for known in record["known"]}
    table = run("list").out
    assert in_cache["path"] in table and "4.50" in table

    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert run("rm", "smollm2-135m").code == 1 and Path(in_cache["path"]).exists()
    assert run("rm", "smollm2-135m", "--yes").code == 0
    assert not Path(in_cache["path"]).exists()
    (Path(in_dist["path"]) / "everycast.json").write_text("{")
    assert "cannot be read" in run("list").out or "cannot read" in run("list").out
    assert run("rm", in_dist["path"], "--yes").code == 0
    assert not Path(in_dist["path"]).exists() and Path("dist").exists()


def test_perplexity(run: Run, machine: FakeMachine, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes("\ufeffgrün\r\nund mehr".encode())
    arguments = ("perplexity", "m", "--text", str(text), "--tokens", "10", "--json")
    result = json.loads(run(*arguments).out)
    assert set(result) == {"perplexity", "num_scored_tokens", "seconds"}
    assert result["num_scored_tokens"] == 9
    assert machine.opened[0][2] == {"context_window_size": 10}
    # The script's logit is 40, all others 0, and it never foresees this text.
    expected = math.exp(40) + 258
    assert result["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert run("perplexity", "m", "--text", str(text)).out.startswith("perplexity ")
    text.write_bytes("grün\nund mehr".encode())  # the same text on another system
    assert run(*arguments, "--activations", "int8").out.startswith("{")
    assert [build["activations"] for build in machine.builds] == ["auto", "int8"]
    text.write_bytes(b"\xff")
    assert "not UTF-8" in run(*arguments).err


def test_bench_passes_its_options(
    run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everycast.benchmarks import command

    seen: list[Any] = []
    monkeypatch.setattr(command, "run_bench", seen.append)
    arguments = ("--against", "openvino", "--works", "decode_512,memory", "--rounds", "3")
    assert run("bench", "m", *arguments, "--json", "o.json", "--plot", "p.png").code == 0
    assert run("bench", "--shape", "qwen3-0.6b", "--activations", "auto,int8").code == 0
    first, second = seen
    assert (first.model, first.rounds, first.json, first.plot) == (
        "m", 3, Path("o.json"), Path("p.png"),
    )  # fmt: skip
    assert [work.name for work in first.works] == ["decode_512", "memory"]
    assert [peer.name for peer in first.peers] == ["openvino"]
    assert (second.shape, second.activations) == ("qwen3-0.6b", ("auto", "int8"))
    assert [work.name for work in second.works] == [
        "decode", "prefill_128", "prefill_512", "batch_8", "batch_32",
    ]  # fmt: skip


def test_doctor(run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("doctor", "--json")
    report = json.loads(result.out)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert {"python", "apache-tvm", "tvm runtime", "cpu", "memory", "cache", "threads"} <= set(
        statuses
    )
    assert statuses["target cpu"] == "ok" and statuses["target ios"] == "info"
    assert report["ok"] == ("fail" not in statuses.values()) == (result.code == 0)
    monkeypatch.setattr("everycast.doctor._installed_version", lambda name: "0.1")
    broken = run("doctor")
    assert broken.code == 1
    assert re.search(r"^fail +apache-tvm .*pip install 'apache-tvm==", broken.out, re.MULTILINE)


def test_a_terminal_sees_bars(
    run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run("compile", "m[/x]").code == 0
    assert "1 B of 2 B" in terminal.getvalue() and "compile" in terminal.getvalue()
