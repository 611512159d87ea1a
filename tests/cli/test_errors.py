"""Mistakes and failures: one line, the right exit code, no traceback."""

import pytest
from everycast import cli
from everycast.artifact.errors import CapacityError, CheckpointError
from fake_machine import FakeMachine, Run


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("model.safetensors is a git-lfs pointer; run git lfs pull"),
        CapacityError("needs 9 GB, there are 2 GB"),
        OSError(28, "No space left on device"),
    ],
)
def test_errors_are_one_line(run: Run, machine: FakeMachine, error: Exception) -> None:
    machine.error = error
    for arguments in (("compile", "m"), ("chat", "m", "--prompt", "a"), ("convert", "m")):
        result = run(*arguments, *(["--quiet"] if arguments[0] != "chat" else []))
        assert result.code == 2 and result.out == ""
        last = result.err.splitlines()[-1]
        assert last.startswith("error: ") and str(error) in last
        assert "Traceback" not in result.err


def test_an_unexpected_error_says_how_to_see_more(
    run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.error = ZeroDivisionError("by zero\nreally")
    result = run("compile", "m", "--json")
    assert result.code == 1 and len(result.err.splitlines()) == 1
    assert "ZeroDivisionError: by zero really" in result.err and "EVERYCAST_DEBUG=1" in result.err
    monkeypatch.setenv("EVERYCAST_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["compile", "m"])


def test_ctrl_c_is_130(run: Run, machine: FakeMachine) -> None:
    machine.error = KeyboardInterrupt()  # type: ignore[assignment]
    assert run("compile", "m").code == 130


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "./missing.gguf"),
        ("chat",),
        ("chat", "m", "--max-tokens", "-1"),
        ("serve", "m", "--port", "70000"),
        ("nothing",),
        ("rm", "nothing"),
        ("perplexity", "m", "--text", "missing.txt"),
        ("bench",),
        ("bench", "m", "--works", "chatting"),
        ("bench", "m", "--against", "lama.cpp"),
        ("bench", "m", "--threads", "0"),
        ("bench", "m", "--rounds", "0"),
        ("bench", "--shape", "llama-3"),
        ("bench", "m", "--peer-isa", "sse"),
        ("bench", "./missing.gguf"),
    ],
)
def test_wrong_arguments(run: Run, machine: FakeMachine, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.code == 2 and "rror: " in result.err and "Traceback" not in result.err
    assert not machine.builds
