"""`everycast chat` that answers once."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from everycast.chat_session import Session
from everycast.engine.sampling_params import SamplingParams
from fake_machine import FakeMachine, Run, echo, make_tokenizer


def test_chat_json(run: Run, machine: FakeMachine) -> None:
    result = run("chat", "m", "--prompt", "grüß dich 😀", "--temperature", "0", "--json")
    assert (result.code, result.err) == (0, "")
    answer = json.loads(result.out)
    assert set(answer) == {
        "text", "token_ids", "prompt_tokens", "ttft_s", "decode_tokens_per_s",
    }  # fmt: skip
    assert answer["text"] == "grüß dich 😀"
    assert machine.tokenizer.decode(answer["token_ids"]) == answer["text"]
    assert answer["prompt_tokens"] > 20
    assert 0 < answer["ttft_s"] < 10 and answer["decode_tokens_per_s"] > 0


def test_chat_shows_plan_text_and_speed(run: Run, machine: FakeMachine) -> None:
    result = run("chat", "m", "--prompt", "hello", "--temperature", "0")
    assert result.out == "hello\n"
    shown = ("weights", "compile", "device: cpu", "memory: 1 MB", "6 tokens", "tokens/s", "first")
    for part in shown:
        assert part in result.err
    quiet = run("chat", "m", "--prompt", "hello", "--temperature", "0", "--quiet")
    assert (quiet.out, quiet.err) == ("hello\n", "")


def test_chat_builds_once_and_passes_its_options(run: Run, machine: FakeMachine) -> None:
    arguments = ("chat", "m", "--prompt", "a", "-q", "q0f32", "--context-window-size", "99")
    run(*arguments)
    run(*arguments, "--max-tokens", "1", "--seed", "1", "--system", "Be brief.")
    assert len(machine.builds) == 1
    (folder, mode, config), _ = machine.opened
    assert folder.name == "m-q4f16_1" and mode == "interactive"
    assert config == {"context_window_size": 99, "num_threads": None}


def test_chat_reads_the_prompt_from_a_pipe(
    run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"from a pipe")
    os.close(write_end)
    with os.fdopen(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("chat", "m", "--temperature", "0", "--quiet").out == "from a pipe\n"


def test_a_base_model_continues_the_text(run: Run, machine: FakeMachine) -> None:
    machine.tokenizer = make_tokenizer(has_template=False)
    machine.script = echo(machine.tokenizer, "", "Once upon", " a time")
    result = run("chat", "m", "--prompt", "Once upon", "--temperature", "0")
    assert result.out == " a time\n" and "no chat template" in result.err


@pytest.mark.parametrize("max_tokens", ["0", "1"])
def test_an_answer_too_short_to_time(run: Run, machine: FakeMachine, max_tokens: str) -> None:
    result = run("chat", "m", "--prompt", "hi", "--max-tokens", max_tokens, "--json")
    answer = json.loads(result.out)
    assert len(answer["token_ids"]) == int(max_tokens)
    assert answer["decode_tokens_per_s"] is None


def test_a_request_error_of_the_engine(run: Run, machine: FakeMachine) -> None:
    result = run("chat", "m", "--prompt", "a" * 300)
    assert result.code == 2 and "256" in result.err.splitlines()[-1]
    assert run("chat", "m", "--prompt", "a", "--temperature", "-1").code == 2


class StubEngine:
    """Answers nothing, and keeps what it was asked."""

    tokenizer = SimpleNamespace(config=SimpleNamespace(chat_templates={"default": ""}))

    def __init__(self, defaults: SamplingParams) -> None:
        self.sampling_defaults = defaults
        self.requests: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=self)

    def create(self, **request: Any) -> "EmptyStream":
        self.requests.append(request)
        return EmptyStream()


class EmptyStream(nullcontext[None]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("defaults", "options", "sampled_with"),
    [
        (SamplingParams(), {"temperature": None, "seed": None}, (0.6, 0.9)),
        (SamplingParams(), {"temperature": 0}, (0, None)),
        (SamplingParams(), {"temperature": 1.0}, (1.0, None)),
        (SamplingParams(temperature=0.7, top_k=20), {"temperature": None}, (None, None)),
    ],
)
def test_only_where_nobody_says_how_to_sample_chat_does(
    defaults: SamplingParams, options: dict[str, Any], sampled_with: tuple[Any, Any]
) -> None:
    engine: Any = StubEngine(defaults)
    Session(engine, None, options).answer([{"role": "user", "content": "hi"}])
    (request,) = engine.requests
    assert (request.get("temperature"), request.get("top_p")) == sampled_with
