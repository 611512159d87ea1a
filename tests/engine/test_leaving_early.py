"""Streams that are left, aborted or forgotten free what they held."""

import gc
import threading
import time

import pytest
from everycast import MLCEngine
from everycast.artifact.errors import EverycastError, RequestError
from scripted_engines import MESSAGES, TEXT, Parts, wait_until_idle


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
