"""Chat: text, streams, stops, limits and choices, over a scripted model."""

import json
from typing import Any

import pytest
from scripted_engines import CONTEXT, MESSAGES, TEXT, Parts, wait_until_idle


def test_chat_answer(parts: Parts) -> None:
    engine = parts.saying(TEXT)
    answer = engine.chat.completions.create(messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == parts.eos
    assert answer.model == "scripted"
    assert answer.usage is not None
    prompt = parts.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1
    assert answer.usage.total_tokens == len(prompt) + len(TEXT.encode()) + 1
    wait_until_idle(engine)


def test_chat_stream_equals_the_answer(parts: Parts) -> None:
    engine = parts.saying(TEXT)
    stream = engine.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = list(stream)
    contents = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(content or "" for content in contents) == TEXT
    # One chunk for each character, and one for the end; never half a character.
    assert contents == [*TEXT, None]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * len(TEXT)]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * len(TEXT), "stop"]
    assert len({chunk.id for chunk in (*chunks, usage)}) == 1
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == len(TEXT.encode()) + 1
    assert all(chunk.usage is None for chunk in chunks)


def test_real_replacement_characters_come_once(parts: Parts) -> None:
    (token_id,) = parts.tokenizer.encode(" \ufffd")
    engine = parts.saying([*parts.tokenizer.encode("a"), token_id, *parts.tokenizer.encode("b")])
    stream = engine.chat.completions.create(messages=MESSAGES, stream=True)
    assert [chunk.choices[0].delta.content for chunk in stream] == ["a", " \ufffd", "b", None]


def test_stop_text_over_tokens_ends_without_another_token(parts: Parts) -> None:
    ids = [i for piece in ("D", "EF", "G", "HI", "J", "K") for i in parts.tokenizer.encode(piece)]
    engine = parts.saying(ids)
    options: dict[str, Any] = {"messages": MESSAGES, "stop": "DEFGHIJ", "return_token_ids": True}
    answer = engine.chat.completions.create(**options)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    assert choice.stop_reason == "DEFGHIJ"
    assert choice.token_ids == ids[:-1]
    (chunk,) = engine.chat.completions.create(stream=True, **options)
    assert chunk.choices[0].delta.content == ""
    assert (chunk.choices[0].finish_reason, chunk.choices[0].token_ids) == ("stop", ids[:-1])


def test_the_text_before_a_stop_text_is_shown(parts: Parts) -> None:
    engine = parts.saying(" L M N O P Q R")
    options: dict[str, Any] = {"messages": MESSAGES, "stop": ["O P Q"]}
    (choice,) = engine.chat.completions.create(**options).choices
    assert (choice.message.content, choice.finish_reason) == (" L M N ", "stop")
    chunks = list(engine.chat.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " L M N "
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_false_start_of_a_stop_text(parts: Parts) -> None:
    engine = parts.saying(" Alice! Alice")
    stream = engine.chat.completions.create(messages=MESSAGES, stop=["\n", "Alice:"], stream=True)
    contents = [chunk.choices[0].delta.content for chunk in stream]
    assert contents == [" ", "Alice!", " ", "Alice"]


def test_min_tokens_puts_off_stop_texts(parts: Parts) -> None:
    engine = parts.saying("ababab")
    create = engine.chat.completions.create
    assert create(messages=MESSAGES, stop="b").choices[0].message.content == "a"
    answer = create(messages=MESSAGES, stop="b", min_tokens=3)
    assert answer.choices[0].message.content == "aba"


def test_stop_token_has_no_text(parts: Parts) -> None:
    engine = parts.saying("abc")
    (token_id,) = parts.tokenizer.encode("c")
    answer = engine.chat.completions.create(messages=MESSAGES, stop_token_ids=[token_id])
    assert answer.choices[0].message.content == "ab"
    assert answer.choices[0].stop_reason == token_id


def test_max_tokens(parts: Parts) -> None:
    engine = parts.saying("a" * 200)
    create = engine.chat.completions.create
    answer = create(messages=MESSAGES, max_tokens=1)
    assert answer.usage is not None
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("a", "length")
    assert answer.usage.completion_tokens == 1
    answer = create(messages=MESSAGES, max_completion_tokens=0)
    assert answer.usage is not None
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("", 0)
    answer = create(messages=MESSAGES)
    assert answer.usage is not None
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == CONTEXT


def test_half_a_character_at_the_end_is_not_shown(parts: Parts) -> None:
    engine = parts.saying("a😀")
    answer = engine.chat.completions.create(messages=MESSAGES, max_tokens=3)
    assert answer.choices[0].message.content == "a"
    assert answer.choices[0].finish_reason == "length"


def test_special_tokens_on_request(parts: Parts) -> None:
    (start,) = parts.tokenizer.encode("<|im_start|>")
    engine = parts.saying([start, *parts.tokenizer.encode("a")])
    create = engine.chat.completions.create
    assert create(messages=MESSAGES).choices[0].message.content == "a"
    answer = create(messages=MESSAGES, skip_special_tokens=False)
    assert answer.choices[0].message.content == "<|im_start|>a"


def test_choices_of_one_seed(parts: Parts) -> None:
    engine = parts.rambling(noise=8.0)
    options: dict[str, Any] = {
        "messages": MESSAGES,
        "n": 4,
        "seed": 5,
        "temperature": 4.0,
        "max_tokens": 12,
    }
    texts = [
        [choice.message.content for choice in engine.chat.completions.create(**options).choices]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    streamed = [""] * 4
    for chunk in engine.chat.completions.create(stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts[0]


def test_messages_may_be_response_objects(parts: Parts) -> None:
    engine = parts.saying("a")
    answer = engine.chat.completions.create(messages=MESSAGES, return_token_ids=True)
    messages = [*MESSAGES, answer.choices[0].message, *MESSAGES]
    second = engine.chat.completions.create(messages=messages, return_token_ids=True)
    ids = second.choices[0].prompt_token_ids
    assert ids is not None
    assert parts.tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "values", [{"top_p": 0.1}, {"top_k": 1}, {"top_p": 0.1, "logit_bias": {7: 100.0}}], ids=str
)
def test_chat_logprobs(parts: Parts, values: dict[str, Any]) -> None:
    engine = parts.saying("é")
    options: dict[str, Any] = {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 5,
        "max_tokens": 3,
        "return_token_ids": True,
        **values,
    }
    answer = engine.chat.completions.create(**options)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.token_ids is not None
    assert len(choice.logprobs.content) == len(choice.token_ids)
    for token_id, entry in zip(choice.token_ids, choice.logprobs.content, strict=True):
        assert bytes(entry.bytes) == parts.tokenizer.id_to_bytes(token_id)
        assert len(entry.top_logprobs) == 5
    if "logit_bias" in values:
        assert choice.token_ids == [7, 7, 7]
        assert all(entry.logprob < -19 for entry in choice.logprobs.content)
    json.dumps(answer.model_dump(), allow_nan=False)
    streamed = [
        entry
        for chunk in engine.chat.completions.create(stream=True, **options)
        for entry in (chunk.choices[0].logprobs or choice.logprobs).content
    ]
    assert streamed == choice.logprobs.content
