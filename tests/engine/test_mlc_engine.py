"""What the Python API looks like from outside: OpenAI's types, imports, names."""

import json
import subprocess
import sys
from typing import Any

import openai.types
import openai.types.chat
import pytest
from scripted_engines import MESSAGES, TEXT, Parts


def test_responses_are_openais(parts: Parts) -> None:
    engine = parts.saying(TEXT)
    chat: dict[str, Any] = {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    # Without echo: OpenAI's server gives null for a prompt's first token, its type forbids that.
    text: dict[str, Any] = {"prompt": "a\n", "logprobs": 2, "prompt_logprobs": 0}
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    pairs: list[tuple[Any, Any]] = [
        (openai.types.chat.ChatCompletion, engine.chat.completions.create(**chat)),
        (openai.types.Completion, engine.completions.create(**text)),
    ]
    for chunk in engine.chat.completions.create(**chat, **usage):
        pairs.append((openai.types.chat.ChatCompletionChunk, chunk))
    for completion in engine.completions.create(**text, **usage):
        # OpenAI's type of a text chunk is that of the whole answer, whose end is not yet known.
        if completion.choices and completion.choices[0].finish_reason is None:
            assert json.loads(completion.model_dump_json())["choices"][0]["finish_reason"] is None
        else:
            pairs.append((openai.types.Completion, completion))
    for kind, response in pairs:
        data = json.loads(response.model_dump_json())
        assert kind.model_validate(data).id == response.id


def test_our_extensions_are_left_out_unless_asked_for(parts: Parts) -> None:
    engine = parts.saying("a")
    answer = json.loads(engine.chat.completions.create(messages=MESSAGES).model_dump_json())
    assert answer["choices"][0].keys() == {
        "index",
        "finish_reason",
        "stop_reason",
        "message",
        "logprobs",
    }
    *_, last = engine.chat.completions.create(messages=MESSAGES, stream=True)
    assert json.loads(last.model_dump_json())["choices"][0]["delta"] == {}


def test_the_import_stays_small() -> None:
    code = (
        "import sys, everycast; assert 'numpy' not in sys.modules; everycast.MLCEngine; "
        "print(*(m for m in sys.modules if '.' not in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    heavy = {"tvm", "torch", "transformers", "fastapi", "openai", "huggingface_hub", "jinja2"}
    assert not modules & heavy


def test_unknown_names_are_attribute_errors() -> None:
    import everycast

    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        everycast.Engine  # noqa: B018
    assert {"MLCEngine", "AsyncMLCEngine"} <= set(dir(everycast))
