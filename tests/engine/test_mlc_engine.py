import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai.types
import openai.types.chat
import pytest
from everycast import AsyncMLCEngine, MLCEngine
from everycast.artifact.errors import EverycastError, RequestError
from everycast.engine.engine_config import EngineConfig
from everycast.engine.loop import EngineLoop
from everycast.engine.model_description import ModelDescription
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.scripted_model import Script, ScriptedModel, hash_script
from everycast.engine.tokenizer import Tokenizer

TEXT = "😀漢字🎉🚀 naïve"
MESSAGES = [{"role": "user", "content": "hi"}]
CONTEXT = 128
PAGES = 256


def bytes_as_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte, so that every character is cut in pieces."""
    table = {tokenizer.id_to_bytes(i): i for i in reversed(range(tokenizer.size))}
    return [table[bytes([byte])] for byte in text.encode()]


def after_prompt(output: Sequence[int], *, prompt_end: int, eos: int) -> Script:
    """`output` after the last `prompt_end` token of the history, then the end token."""

    def script(history: tuple[int, ...]) -> int:
        if prompt_end not in history:
            return eos
        num_done = history[::-1].index(prompt_end)
        return output[num_done] if num_done < len(output) else eos

    return script


def make_loop(
    tokenizer: Tokenizer, script: Script, *, noise: float = 0.0, step_time_s: float = 0.0
) -> EngineLoop:
    runner = ScriptedModel(
        script,
        # Padded, as real models are.
        vocab_size=tokenizer.size + 12,
        num_pages=PAGES,
        context_window_size=CONTEXT,
        noise=noise,
        step_time_s=step_time_s,
    )
    limits = EngineConfig(mode="server", prefix_cache_mode="disable").resolve(runner.info, PAGES)
    eos = tokenizer.eos_token_id
    return EngineLoop(
        runner, limits, tokenizer_size=tokenizer.size, eos_token_ids=() if eos is None else (eos,)
    )


class Parts:
    """Makes engines over scripted models, and ends them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        assert tokenizer.eos_token_id is not None
        self.eos = tokenizer.eos_token_id
        # Every chat prompt and every prompt of these tests ends with it.
        (self.newline,) = tokenizer.encode("\n")
        self.endings: list[Callable[[], None]] = []

    def saying(self, output: str | Sequence[int], **options: Any) -> MLCEngine:
        return self._end(MLCEngine.from_parts(*self.parts(output, **options)))

    def rambling(self, **options: Any) -> MLCEngine:
        """An engine whose text has no end and no pattern."""
        loop = make_loop(self.tokenizer, hash_script(self.tokenizer.size), **options)
        return self._end(MLCEngine.from_parts(loop, self.tokenizer, ModelDescription("scripted")))

    def parts(
        self, output: str | Sequence[int], **options: Any
    ) -> tuple[EngineLoop, Tokenizer, ModelDescription]:
        ids = bytes_as_tokens(self.tokenizer, output) if isinstance(output, str) else output
        script = after_prompt(ids, prompt_end=self.newline, eos=self.eos)
        loop = make_loop(self.tokenizer, script, **options)
        return loop, self.tokenizer, ModelDescription("scripted", SamplingParams(temperature=0))

    def _end(self, engine: MLCEngine) -> MLCEngine:
        self.endings.append(engine.terminate)
        return engine


@pytest.fixture
def parts(byte_level: Tokenizer) -> Iterator[Parts]:
    parts = Parts(byte_level)
    yield parts
    for end in parts.endings:
        end()


def wait_until_idle(engine: MLCEngine | AsyncMLCEngine) -> None:
    """Returns when no sequence is there and all pages are free; fails after two seconds."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        metrics = engine.metrics()
        is_empty = metrics.num_running_sequences == metrics.num_waiting_sequences == 0
        if is_empty and metrics.num_available_pages == metrics.num_pages:
            return
        time.sleep(0.005)
    pytest.fail(f"pages or sequences are left: {engine.metrics()}")


# Chat


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


# Text completions


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


@pytest.mark.parametrize("bias", [{}, {7: 100.0}])
def test_chat_logprobs(parts: Parts, bias: dict[int, float]) -> None:
    engine = parts.saying("é")
    options: dict[str, Any] = {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 5,
        "top_p": 0.1,
        "logit_bias": bias,
        "max_tokens": 3,
        "return_token_ids": True,
    }
    answer = engine.chat.completions.create(**options)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.token_ids is not None
    assert len(choice.logprobs.content) == len(choice.token_ids)
    for token_id, entry in zip(choice.token_ids, choice.logprobs.content, strict=True):
        assert bytes(entry.bytes) == parts.tokenizer.id_to_bytes(token_id)
        assert len(entry.top_logprobs) == 5
    if bias:
        assert choice.token_ids == [7, 7, 7]
        assert all(entry.logprob < -19 for entry in choice.logprobs.content)
    json.dumps(answer.model_dump(), allow_nan=False)
    streamed = [
        entry
        for chunk in engine.chat.completions.create(stream=True, **options)
        for entry in (chunk.choices[0].logprobs or choice.logprobs).content
    ]
    assert streamed == choice.logprobs.content


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


# Errors


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


# Leaving early


def test_leaving_a_stream_frees_its_pages(parts: Parts) -> None:
    engine = parts.rambling(step_time_s=0.002)
    create = engine.chat.completions.create
    for chunk in create(messages=MESSAGES, stream=True):
        assert chunk.id
        break
    wait_until_idle(engine)
    create(messages=MESSAGES, stream=True)
    wait_until_idle(engine)
    with create(messages=MESSAGES, stream=True) as stream:
        next(stream)
    wait_until_idle(engine)
    assert list(stream) == []
    assert engine.metrics().counters.num_aborted_requests == 3
    assert engine.metrics().counters.num_output_tokens < 3 * 60


def test_abort_by_id(parts: Parts) -> None:
    engine = parts.rambling(step_time_s=0.002)
    stream = engine.chat.completions.create(messages=MESSAGES, stream=True, request_id="mine")
    assert next(stream).id == "mine"
    with pytest.raises(RequestError, match="already running"):
        engine.chat.completions.create(messages=MESSAGES, request_id="mine")
    engine.abort("mine")
    engine.abort("nobody")
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    wait_until_idle(engine)
    answer = engine.completions.create(prompt="a\n", request_id="mine", max_tokens=2)
    assert answer.choices[0].finish_reason == "length"


def test_terminate(parts: Parts) -> None:
    engine = parts.rambling(step_time_s=0.002)
    stream = engine.chat.completions.create(messages=MESSAGES, stream=True)
    next(stream)
    engine.terminate()
    engine.terminate()
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    with pytest.raises(EverycastError, match="shut down"):
        engine.chat.completions.create(messages=MESSAGES)


def test_a_forgotten_engine_ends_its_thread(parts: Parts) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    before = names().count("everycast-engine")
    stream = MLCEngine.from_parts(*parts.parts(TEXT)).chat.completions.create(
        messages=MESSAGES, stream=True
    )
    # The stream alone keeps the engine.
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT
    del stream
    gc.collect()
    deadline = time.monotonic() + 2
    while names().count("everycast-engine") > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert names().count("everycast-engine") == before


# Async


def test_async_answers_and_streams(parts: Parts) -> None:
    async def main() -> None:
        async with AsyncMLCEngine.from_parts(*parts.parts(TEXT)) as engine:
            answer = await engine.chat.completions.create(messages=MESSAGES)
            assert answer.choices[0].message.content == TEXT
            stream = await engine.chat.completions.create(messages=MESSAGES, stream=True)
            contents = [chunk.choices[0].delta.content async for chunk in stream]
            assert contents == [*TEXT, None]
            completion = await engine.completions.create(prompt=["a\n", "b\n"])
            assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
            with pytest.raises(RequestError, match="max_tokens"):
                await engine.completions.create(prompt="a\n", max_tokens=-1)
            # The pieces of several streams come while others are read.
            async with await engine.completions.create(prompt="a\n", stream=True) as text_stream:
                async for chunk in text_stream:
                    assert chunk.choices[0].text == TEXT[0]
                    break
            await asyncio.to_thread(wait_until_idle, engine)

    asyncio.run(main())


def test_async_leaving_early_frees_pages(parts: Parts) -> None:
    async def main() -> None:
        engine = AsyncMLCEngine.from_parts(*parts.parts("a" * 90, step_time_s=0.002))
        async for _ in await engine.completions.create(prompt="a\n", stream=True):
            break
        await asyncio.to_thread(wait_until_idle, engine)

        async def read() -> None:
            async for _ in await engine.completions.create(prompt="a\n", stream=True):
                pass

        for work in (read(), engine.completions.create(prompt="a\n")):
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until_idle, engine)
        assert engine.metrics().counters.num_aborted_requests == 3
        engine.terminate()

    asyncio.run(main())


def test_abort_storm(parts: Parts) -> None:
    """64 requests at once, half of them left at different times: the others are as if alone."""
    num_requests = 64

    async def main() -> None:
        loop = make_loop(parts.tokenizer, hash_script(parts.tokenizer.size))
        async with AsyncMLCEngine.from_parts(
            loop, parts.tokenizer, ModelDescription("m")
        ) as engine:

            async def run(i: int) -> list[int] | None:
                stream = await engine.completions.create(
                    prompt=[i + 1, i + 2],
                    max_tokens=40,
                    ignore_eos=True,
                    stream=True,
                    return_token_ids=True,
                )
                ids: list[int] = []
                async for chunk in stream:
                    ids += chunk.choices[0].token_ids or []
                    if i % 2 and len(ids) >= i // 2 + 8:
                        return None
                return ids

            alone = [await run(i) for i in range(0, 8, 2)]
            together = await asyncio.gather(*(run(i) for i in range(num_requests)))
            assert [together[i] for i in range(0, 8, 2)] == alone
            assert [len(ids or ()) for ids in together[::2]] == [40] * (num_requests // 2)
            assert together[1::2] == [None] * (num_requests // 2)
            await asyncio.to_thread(wait_until_idle, engine)

    asyncio.run(main())


# The outside


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
