"""Completions of plain prompts, and log probabilities, over a scripted model."""

import json
from typing import Any

import pytest
from everycast import MLCEngine
from everycast.engine.model_description import ModelDescription
from everycast.engine.scripted_model import hash_script
from everycast.engine.tokenizer import Tokenizer
from scripted_engines import MESSAGES, Parts, make_loop


def test_completion_of_many_prompts(parts: Parts) -> None:
    engine = parts.saying("ok")
    ids = parts.tokenizer.encode("a\n")
    create = engine.completions.create
    assert create(prompt="a\n").choices[0].text == "ok"
    assert create(prompt=ids).choices[0].text == "ok"
    answer = create(prompt=["a\n", "b\n"], n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["a\nok", "a\nok", "b\nok", "b\nok"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids) + len(parts.tokenizer.encode("b\n"))
    assert answer.usage.completion_tokens == 4 * 3
    answer = create(prompt=[ids, ids], echo=True)
    assert [choice.text for choice in answer.choices] == ["a\nok", "a\nok"]
    texts = ["", ""]
    for chunk in create(prompt=[ids, ids], echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["a\nok", "a\nok"]


def test_completion_logprobs(parts: Parts) -> None:
    engine = parts.saying("é!")
    answer = engine.completions.create(prompt="ab\n", logprobs=2, echo=True)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    prompt = [parts.tokenizer.decode([i]) for i in parts.tokenizer.encode("ab\n")]
    assert logprobs.tokens == [*prompt, r"bytes:\xc3", r"bytes:\xa9", "!", "<|im_end|>"]
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    # The scripted token has nearly all of the probability.
    assert logprobs.token_logprobs[-1] == pytest.approx(0, abs=1e-3)
    assert all(entry and 2 <= len(entry) <= 3 for entry in logprobs.top_logprobs[1:])
    offsets = logprobs.text_offset[-4:]
    assert choice.text == "ab\né!" and offsets == [3, 3, 4, 5]
    json.dumps(answer.model_dump(), allow_nan=False)


def test_only_the_prompts_logprobs(parts: Parts) -> None:
    engine = parts.saying("x")
    answer = engine.completions.create(prompt="ab\n", logprobs=0, echo=True, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == "ab\n" and choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens) == len(parts.tokenizer.encode("ab\n"))
    assert choice.logprobs.top_logprobs is None
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_prompt_logprobs_by_token_id(parts: Parts) -> None:
    engine = parts.saying("x")
    ids = parts.tokenizer.encode("ab\n")
    answer = engine.completions.create(prompt=ids, prompt_logprobs=1, n=2)
    for choice in answer.choices:
        assert choice.prompt_logprobs is not None
        assert choice.prompt_logprobs[0] is None
        assert len(choice.prompt_logprobs) == len(ids)
        for token_id, entry in zip(ids[1:], choice.prompt_logprobs[1:], strict=True):
            assert entry is not None
            assert entry[token_id].decoded_token == parts.tokenizer.decode([token_id])


def test_begin_token_comes_once(sentencepiece: Tokenizer) -> None:
    config = type(sentencepiece.config)(
        sentencepiece.config.special_tokens,
        {"default": "{{ bos_token }}{{ messages[0].content }}"},
    )
    tokenizer = Tokenizer(sentencepiece._json, config)
    loop = make_loop(tokenizer, hash_script(tokenizer.size, eos_token_id=2, eos_every=3))
    with MLCEngine.from_parts(loop, tokenizer, ModelDescription("m")) as engine:
        answers: list[Any] = [
            engine.chat.completions.create(messages=MESSAGES, return_token_ids=True),
            engine.completions.create(prompt="hi", return_token_ids=True),
            engine.completions.create(prompt="<s>hi", return_token_ids=True),
        ]
    ids = [answer.choices[0].prompt_token_ids for answer in answers]
    assert ids[0] == ids[1] == ids[2] == tokenizer.encode("hi")
    assert ids[0].count(1) == 1
