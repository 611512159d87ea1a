"""The official client against a real server: what an application sees."""

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from everycast.engine.scripted_model import Script, script_after
from everycast.engine.tokenizer import Tokenizer

Serve = Callable[..., Any]
PADDED_VOCAB = 320
NUM_TOKENS = 259
HELLO = "Hello, 世界 😀!"
MESSAGES = [{"role": "user", "content": "Hi"}]


def reply(tokenizer: Tokenizer, text: str) -> Script:
    """Every chat is answered with `text`."""
    marker = tokenizer.encode("assistant\n", add_bos=False)
    return script_after(marker, tokenizer.encode(text, add_bos=False), eos_token_id=2)


def test_a_streamed_chat_is_the_whole_one_in_pieces(serve: Serve, tokenizer: Tokenizer) -> None:
    server = serve(reply(tokenizer, HELLO))
    create = server.client.chat.completions.create
    whole = create(model="scripted", messages=MESSAGES, temperature=0)
    assert whole.choices[0].message.content == HELLO
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens > len(HELLO)

    stream = create(
        model="scripted",
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert last.choices == [] and last.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(deltas) == HELLO
    assert not any("\ufffd" in delta for delta in deltas)
    assert len(deltas) > 5
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    server.wait_until_idle()


def test_text_completions_and_token_ids(serve: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two", add_bos=False)
    script = script_after(ids, tokenizer.encode(" three", add_bos=False), eos_token_id=2)
    create = serve(script).client.completions.create
    for prompt in ("one two", ids):
        answer = create(model="scripted", prompt=prompt, temperature=0)
        assert answer.choices[0].text == " three"
    both = create(
        model="scripted",
        prompt=["one two", "and one two"],
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert [choice.text for choice in both.choices] == [" three", " three"]
    assert both.choices[1].model_dump()["prompt_token_ids"][-len(ids) :] == ids
    pieces = [c.choices[0].text for c in create(model="scripted", prompt="one two", stream=True)]
    assert "".join(pieces) == " three"


def test_two_clients_at_once(serve: Serve, tokenizer: Tokenizer) -> None:
    server = serve(reply(tokenizer, HELLO * 4), step_time_s=0.002)
    meeting = threading.Barrier(2, timeout=10)
    texts: list[str] = []

    def chat() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = client.chat.completions.create(
                model="scripted", messages=MESSAGES, temperature=0, stream=True
            )
            text = next(stream).choices[0].delta.content or ""
            meeting.wait()  # both streams have begun, so neither waits for the other's end
            texts.append(text + "".join(c.choices[0].delta.content or "" for c in stream))

    threads = [threading.Thread(target=chat) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert texts == [HELLO * 4] * 2
    server.wait_until_idle()


def test_models_health_and_metrics(serve: Serve, tokenizer: Tokenizer) -> None:
    server = serve(reply(tokenizer, HELLO))
    assert [model.id for model in server.client.models.list()] == ["scripted"]
    assert server.client.models.retrieve("scripted").owned_by == "everycast"
    with pytest.raises(openai.NotFoundError, match="org/other"):
        server.client.models.retrieve("org/other")
    assert server.http.get("/health").json() == {"status": "ok"}
    server.client.chat.completions.create(model="scripted", messages=MESSAGES)
    text = server.http.get("/metrics").text
    values = dict(
        line.split(" ") for line in text.splitlines() if line and not line.startswith("#")
    )
    assert float(values["everycast_requests_total"]) == 1
    assert values["everycast_available_pages"] == values["everycast_pages"] == "128"
    assert values["everycast_active_requests"] == "0"


def test_logit_bias(serve: Serve, tokenizer: Tokenizer) -> None:
    """Case 10: a bias decides, and ids that no token has are refused."""
    server = serve(reply(tokenizer, "aaaa"))
    create = server.client.chat.completions.create
    wanted = tokenizer.encode("z", add_bos=False)[0]
    unwanted = tokenizer.encode("a", add_bos=False)[0]
    forced = create(
        model="scripted", messages=MESSAGES, max_tokens=4, logit_bias={str(wanted): 100}
    )
    assert forced.choices[0].message.content == "zzzz"
    other = create(
        model="scripted",
        messages=MESSAGES,
        temperature=0,
        max_tokens=1,
        logit_bias={str(unwanted): -100},
    )
    assert other.choices[0].message.content != "a"
    for token_id in (-1, NUM_TOKENS, PADDED_VOCAB - 1, PADDED_VOCAB, 10**9):
        with pytest.raises(openai.BadRequestError, match="logit_bias") as caught:
            create(model="scripted", messages=MESSAGES, logit_bias={str(token_id): 1})
        assert caught.value.param == "logit_bias"
    assert create(model="scripted", messages=MESSAGES).choices[0].message.content == "aaaa"


def test_max_tokens(serve: Serve, tokenizer: Tokenizer) -> None:
    """Case 12: one is one, zero is zero, below is refused, none runs to the context's end."""
    marker = tokenizer.encode("go", add_bos=False)
    a = tokenizer.encode("a", add_bos=False)[0]
    server = serve(lambda history: a, context_window_size=64)
    create = server.client.completions.create
    one = create(model="scripted", prompt="go", max_tokens=1)
    assert (one.choices[0].text, one.choices[0].finish_reason) == ("a", "length")
    zero = create(model="scripted", prompt="go", max_tokens=0)
    assert zero.choices[0].text == ""
    assert zero.usage is not None and zero.usage.completion_tokens == 0
    echoed = create(model="scripted", prompt="go", max_tokens=0, echo=True, logprobs=1)
    assert echoed.choices[0].text == "go"
    assert echoed.choices[0].logprobs is not None
    logprobs = echoed.choices[0].logprobs.token_logprobs
    assert logprobs is not None and len(logprobs) == 2 and logprobs[1] < 0
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        create(model="scripted", prompt="go", max_tokens=-1)
    full = create(model="scripted", prompt="go")
    assert full.usage is not None and full.usage.total_tokens == 64
    assert full.choices[0].finish_reason == "length"
    assert full.choices[0].text == "a" * (64 - len(marker))


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_empty_prompts(
    serve: Serve, tokenizer: Tokenizer, prompt: str | list[str] | list[list[int]]
) -> None:
    """Case 13: refused, and the server goes on."""
    server = serve(reply(tokenizer, "ok"))
    with pytest.raises(openai.BadRequestError, match="prompt") as caught:
        server.client.completions.create(model="scripted", prompt=prompt)
    assert caught.value.param == "prompt"
    empty = server.client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": ""}], temperature=0
    )
    assert empty.choices[0].message.content == "ok"
    with pytest.raises(openai.BadRequestError, match="messages"):
        server.client.chat.completions.create(model="scripted", messages=[])


def test_prompts_longer_than_the_context(serve: Serve, tokenizer: Tokenizer) -> None:
    """Case 14: never cut, refused with both numbers, streamed or not."""
    a = tokenizer.encode("a", add_bos=False)[0]
    server = serve(lambda history: a, context_window_size=128)
    create = server.client.completions.create
    for (num_tokens, max_tokens), stream in itertools.product(
        ((129, 16), (1000, 16), (129, None), (120, 50)), (False, True)
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="scripted", prompt=[a] * num_tokens, max_tokens=max_tokens, stream=stream)
        assert str(num_tokens) in caught.value.message and "128" in caught.value.message
        assert "-" not in caught.value.message.partition("message")[2]
    fits = create(model="scripted", prompt=[a] * 120, max_tokens=8)
    assert fits.usage is not None and fits.usage.prompt_tokens == 120


@pytest.mark.parametrize("name", ["scripted", "script"])
def test_names_of_the_model(serve: Serve, tokenizer: Tokenizer, name: str) -> None:
    """Its folder's and its checkpoint's; answers have the first."""
    server = serve(reply(tokenizer, HELLO))
    answer = server.client.chat.completions.create(model=name, messages=MESSAGES)
    assert answer.model == "scripted"


def test_unknown_model(serve: Serve, tokenizer: Tokenizer) -> None:
    server = serve(reply(tokenizer, HELLO))
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert "'gpt-4'" in caught.value.message and "'scripted'" in caught.value.message


def test_an_error_on_the_way_is_the_last_event(serve: Serve, tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a", add_bos=False)[0]

    def script(history: tuple[int, ...]) -> int:
        if history[-3:] == (a, a, a):
            raise RuntimeError("the device is gone /secret/path")
        return a

    server = serve(script)
    body = {"messages": MESSAGES, "stream": True, "temperature": 0}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        events = [line for line in response.iter_lines() if line]
    assert response.status_code == 200
    assert "[DONE]" not in events[-1]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "secret" not in error["message"]
    with pytest.raises(openai.InternalServerError):
        server.client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=0)
    server.wait_until_idle()
