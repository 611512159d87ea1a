from typing import Any

import pytest
from everycast.artifact.errors import RequestError
from everycast.engine.protocol import ChatCompletionRequest, CompletionRequest
from everycast.engine.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9)


@pytest.mark.parametrize(
    ("values", "param", "words"),
    [
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"content": "a"}]}, "messages", r"messages\[0\]\.role is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", r"messages\[0\]\.content: "),
        ({"temperature": "1"}, "temperature", "valid number, got '1'"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer, got 1.5"),
        ({"n": True}, "n", "valid integer"),
        ({"stop": [1]}, "stop", "valid string"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"maxtokens": 1}, "maxtokens", "did you mean max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools", "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ],
)
def test_bad_chat_requests_name_the_field(values: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        ChatCompletionRequest.parse({"messages": MESSAGES, **values})
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "prompt is missing"),
        ([], "empty list"),
        (["a", 1], "prompt: "),
        ([True], "prompt: "),
        ({"a": 1}, "prompt: "),
    ],
)
def test_bad_prompts_are_named(prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        CompletionRequest.parse({"prompt": prompt}).prompts()
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [""]),
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert CompletionRequest.parse({"prompt": prompt}).prompts() == prompts


def test_fields_that_change_nothing_are_accepted() -> None:
    request = ChatCompletionRequest.parse(
        {
            "messages": MESSAGES,
            "user": "me",
            "store": False,
            "metadata": {"a": "b"},
            "tools": [],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "parallel_tool_calls": True,
            "stop": None,
            "top_p": None,
        }
    )
    assert request.sampling_params(DEFAULTS) == DEFAULTS


def test_request_values_win_over_the_models_advice() -> None:
    request = ChatCompletionRequest.parse(
        {
            "messages": MESSAGES,
            "temperature": 0,
            "stop": "x",
            "logit_bias": {"7": 1, 8: -2.5},
            "max_tokens": 3,
            "max_completion_tokens": 5,
            "logprobs": True,
            "top_logprobs": 2,
        }
    )
    assert request.sampling_params(DEFAULTS) == SamplingParams(
        temperature=0,
        top_p=0.9,
        stop=("x",),
        logit_bias={7: 1.0, 8: -2.5},
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )


def test_completion_logprobs() -> None:
    request = CompletionRequest.parse({"prompt": "a", "logprobs": 3, "echo": True})
    params = request.sampling_params(SamplingParams())
    assert (params.logprobs, params.top_logprobs, params.prompt_logprobs) == (True, 3, 3)
    with pytest.raises(RequestError, match="from 0 to 20, got 21") as caught:
        CompletionRequest.parse({"prompt": "a", "logprobs": 21}).sampling_params(DEFAULTS)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
    ],
)
def test_values_that_only_sampling_sees(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        ChatCompletionRequest.parse({"messages": MESSAGES, **values}).sampling_params(DEFAULTS)
    assert caught.value.param == param


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = ChatCompletionRequest.parse(
        {"messages": [{"role": "user", "content": parts, "name": "Ann"}]}
    )
    assert request.template_messages() == [{"role": "user", "content": "a\nb", "name": "Ann"}]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": [{"type": "image_url", "image_url": {}}]}, "content .* 'image_url'; .*text"),
        ({"content": [{"type": "text"}]}, "content holds a part of type 'text' without a text"),
        ({"content": [{}]}, "content holds a part of type None"),
        ({"content": None}, "content is missing"),
        ({}, "content is missing"),
        ({"role": "assistant", "tool_calls": []}, "content is missing"),
    ],
)
def test_content_that_is_not_text_is_refused(message: dict[str, Any], words: str) -> None:
    request = ChatCompletionRequest.parse({"messages": [*MESSAGES, {"role": "user", **message}]})
    with pytest.raises(RequestError, match=rf"messages\[1\]\.{words}") as caught:
        request.template_messages()
    assert caught.value.param == "messages"


def test_a_message_of_tool_calls_needs_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    request = ChatCompletionRequest.parse({"messages": [*MESSAGES, message]})
    assert request.template_messages()[1]["tool_calls"] == [{"id": "1"}]


def test_template_kwargs() -> None:
    request = ChatCompletionRequest.parse(
        {
            "messages": MESSAGES,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert request.template_kwargs() == {"enable_thinking": False, "reasoning_effort": "low"}
    request = ChatCompletionRequest.parse(
        {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}
    )
    with pytest.raises(RequestError, match="must not hold messages"):
        request.template_kwargs()
