"""`everycast chat` in a terminal."""

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_machine
import pytest
from everycast import chat_session
from everycast.engine.mlc_engine import MLCEngine
from fake_machine import chat_script, make_tokenizer, scripted_parts


@pytest.fixture
def engine() -> Iterator[MLCEngine]:
    tokenizer = make_tokenizer()
    with MLCEngine.from_parts(*scripted_parts(chat_script(tokenizer), tokenizer)) as engine:
        yield engine


def test_ctrl_c_stops_the_answer_and_frees_its_pages(engine: MLCEngine) -> None:
    session = chat_session.Session(engine, None, {"temperature": 0})

    def show(text: str) -> None:
        if text == "c":
            raise KeyboardInterrupt

    answer = session.answer([{"role": "user", "content": "abcdefgh"}], show)
    assert answer.text == "abc" and answer.finish_reason == "interrupted"
    deadline = time.monotonic() + 10
    while engine.metrics().num_available_pages != engine.metrics().num_pages:
        assert time.monotonic() < deadline
    assert session.answer([{"role": "user", "content": "xyz"}]).text == "xyz"


def converse(
    engine: MLCEngine, inputs: list[str | type[BaseException]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(inputs)

    def read(prompt: str) -> str:
        line = next(lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    chat_session.converse(chat_session.Session(engine, None, {"temperature": 0}))


def test_a_conversation(
    engine: MLCEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(
        engine,
        [
            "/help", "", "one", "/stats", KeyboardInterrupt, "two \\", "three", "/frob", "/reset",
            "/etc/passwd is a file",
        ],
        monkeypatch,
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert out == "one\ntwo \nthree\n/etc/passwd is a file\n"
    for part in ("/reset", "32 of 32 KV pages free", "Ctrl-D", "/frob is no command", "forgotten"):
        assert part in err


def test_a_conversation_that_outgrows_the_context(
    engine: MLCEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(engine, ["a" * 150, "b" * 100, "/reset", "c", "/exit", "never"], monkeypatch)
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "c" and "b" not in out and "never" not in out
    assert "256" in err and "/reset" in err


def test_history_is_in_the_prompt(engine: MLCEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    answer = chat_session.Session.answer

    def spy(self: Any, turns: list[dict[str, str]], *show: Any) -> chat_session.Answer:
        seen.append(len(turns))
        return answer(self, turns, *show)

    monkeypatch.setattr(chat_session.Session, "answer", spy)
    converse(engine, ["a", "b", "/reset", "c"], monkeypatch)
    assert seen == [1, 3, 1]


def test_control_characters_never_reach_the_terminal() -> None:
    from everycast.console import plain

    assert plain("a\x1b[2J\tb\nc\x07\x9b1m 世界") == "a[2J\tb\nc1m 世界"


def test_a_real_terminal() -> None:
    """A pasted text of two lines is one message; a signal stops the answer; Ctrl-D leaves."""
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(fake_machine.__file__).parent)!r})
        from everycast import MLCEngine, chat_session
        from fake_machine import chat_script, make_tokenizer, scripted_parts
        tokenizer = make_tokenizer()
        parts = scripted_parts(chat_script(tokenizer), tokenizer, step_time_s=0.01)
        with MLCEngine.from_parts(*parts) as engine:
            chat_session.converse(chat_session.Session(engine, None, {{"temperature": 0}}))
    """)
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(secondary)
    seen = b""

    def until(mark: bytes) -> None:
        nonlocal seen
        while mark not in seen:
            seen += os.read(primary, 4096)
        seen = seen.partition(mark)[2]

    try:
        until(b">>> ")
        os.write(primary, b"\x1b[200~one\ntwo\x1b[201~\n")
        until(b"one\r\ntwo\r\n\x1b[2m8 tokens")
        until(b">>> ")
        os.write(primary, b"x" * 100 + b"\n")
        until(b"x" * 100)
        until(b"xxx")
        process.send_signal(signal.SIGINT)
        until(b"stopped")
        until(b">>> ")
        os.write(primary, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(primary)
