"""What is refused, and that the next request is answered."""

from typing import Any

import pytest
from everycast import MLCEngine
from everycast.artifact.errors import EverycastError, RequestError
from everycast.engine.model_description import ModelDescription
from scripted_engines import CONTEXT, MESSAGES, Parts, make_loop, wait_until_idle


@pytest.mark.parametrize(
    ("values", "param", "words"),
    [
        ({"max_tokens": -1}, "max_tokens", "at least 0, got -1"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"top_logprobs": 5}, "top_logprobs", "needs logprobs"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "token id 100000"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "token id -1"),
        ({"messages": [{"role": "user", "content": "a" * 500}]}, "messages", str(CONTEXT)),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "surrogate"),
        ({"max_tokens": CONTEXT}, "max_tokens", str(CONTEXT)),
    ],
)
def test_a_bad_request_is_named_and_the_next_one_runs(
    parts: Parts, values: dict[str, Any], param: str | None, words: str
) -> None:
    engine = parts.saying("ok")
    for stream in (False, True):
        with pytest.raises(RequestError, match=words) as caught:
            engine.chat.completions.create(**{"messages": MESSAGES, "stream": stream, **values})
        assert caught.value.param == param
    answer = engine.chat.completions.create(messages=MESSAGES)
    assert answer.choices[0].message.content == "ok"
    wait_until_idle(engine)


def test_padded_ids_cannot_be_biased(parts: Parts) -> None:
    engine = parts.saying("ok")
    size = parts.tokenizer.size
    with pytest.raises(RequestError, match=f"run from 0 to {size - 1}"):
        engine.chat.completions.create(messages=MESSAGES, logit_bias={size: 1})


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a\n", ""]])
def test_empty_prompts(parts: Parts, prompt: Any) -> None:
    engine = parts.saying("ok")
    with pytest.raises(RequestError, match="empty") as caught:
        engine.completions.create(prompt=prompt)
    assert caught.value.param == "prompt"
    assert engine.completions.create(prompt="a\n").choices[0].text == "ok"
    wait_until_idle(engine)


def test_empty_chat_content_is_valid(parts: Parts) -> None:
    answer = parts.saying("ok").chat.completions.create(messages=[{"role": "user", "content": ""}])
    assert answer.choices[0].message.content == "ok"


@pytest.mark.parametrize("length", [129, 1000])
def test_prompt_longer_than_the_context_names_both(parts: Parts, length: int) -> None:
    engine = parts.saying("ok")
    with pytest.raises(RequestError, match=rf"{length} tokens.* {CONTEXT} tokens"):
        engine.completions.create(prompt=[5] * length)
    with pytest.raises(RequestError, match=rf"120 tokens.*50.*{CONTEXT}"):
        engine.completions.create(prompt=[5] * 120, max_tokens=50)


def test_a_model_that_fails_is_an_error(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    def script(history: tuple[int, ...]) -> int:
        if len(history) > 40:
            raise RuntimeError("device lost")
        return parts.newline

    loop = make_loop(parts.tokenizer, script)
    with MLCEngine.from_parts(loop, parts.tokenizer, ModelDescription("m")) as engine:
        with pytest.raises(EverycastError, match="device lost"):
            engine.chat.completions.create(messages=MESSAGES)
        stream = engine.chat.completions.create(messages=MESSAGES, stream=True)
        with pytest.raises(EverycastError, match="device lost"):
            list(stream)
        assert list(stream) == []
        wait_until_idle(engine)
