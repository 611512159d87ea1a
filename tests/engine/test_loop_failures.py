"""Aborts at any moment, and failures of the model, of a sink, of our own."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from everycast.artifact.errors import EverycastError
from everycast.engine.model_runner import StepInput
from everycast.engine.scripted_model import (
    RecordingSink,
    ScriptedModel,
    hash_script,
)
from everycast.engine.sequence import Request
from everycast.engine.token_sink import RequestOutput
from scripted_loop import (
    GREEDY,
    VOCAB,
    assert_all_pages_return,
    make_loop,
    make_model,
    run,
    submit,
    text_of,
)


def test_abort_frees_pages_in_one_step_and_lets_the_next_start() -> None:
    loop = make_loop(make_model(num_pages=6), is_prefix_cache_enabled=False)
    first = submit(loop, range(1, 21), replace(GREEDY, max_tokens=4), "first")
    second = submit(loop, range(30, 45), replace(GREEDY, max_tokens=2), "second")
    loop.step()  # a long prefill, half way
    loop.step()
    assert not second.outputs
    loop.abort("first")
    num_computed = len(first.heard[0])
    loop.step()
    assert first.finish_reasons == {0: "abort"} and len(first.heard[0]) == num_computed
    assert second.token_ids[0] == text_of(range(30, 45), 1)
    run(loop)
    assert_all_pages_return(loop)


class Meddler(ScriptedModel):
    """Does something while the model runs."""

    def __init__(self) -> None:
        super().__init__(hash_script(VOCAB), vocab_size=VOCAB, num_pages=64, page_size=4)
        self.during: list[object] = []

    def execute(self, step: StepInput) -> np.ndarray:
        logits = super().execute(step)
        if self.during:
            action = self.during.pop(0)
            if isinstance(action, Exception):
                raise action
            if callable(action):
                action()
            if action == "nan":
                logits[0] = np.nan
        return logits


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_abort_while_the_model_runs(prompt_logprobs: int | None) -> None:
    model = Meddler()
    loop = make_loop(model)
    params = replace(GREEDY, max_tokens=5, prompt_logprobs=prompt_logprobs)
    first = submit(loop, range(1, 10), params, "first")
    second = submit(loop, range(3, 9), params, "second")
    model.during.append(lambda: loop.abort("first"))
    loop.step()
    assert first.finish_reasons == {0: "abort"} and first.heard[0] == []
    assert loop.metrics().num_running_sequences == 1
    run(loop)
    assert second.token_ids[0] == text_of(range(3, 9), 5)
    assert_all_pages_return(loop)


def test_an_id_may_be_used_again_right_after_its_abort() -> None:
    model = Meddler()
    loop = make_loop(model)
    params = replace(GREEDY, max_tokens=3)
    submit(loop, range(1, 10), params)
    again = RecordingSink()

    def abort_and_submit() -> None:
        loop.abort("a")
        loop._take_inbox()
        loop.submit(Request("a", (4, 5), params), again)

    model.during.append(abort_and_submit)
    run(loop)
    assert again.token_ids[0] == text_of([4, 5], 3)


def test_abort_of_what_is_over_or_never_was_is_no_error() -> None:
    loop = make_loop()
    sink = submit(loop, [1], replace(GREEDY, max_tokens=1))
    run(loop)
    loop.abort("a")
    loop.abort("never")
    assert not loop.step() and sink.finish_reasons == {0: "length"}


def test_a_failing_model_fails_its_step_and_the_loop_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Meddler()
    loop = make_loop(model, max_num_sequence=2, chunk=8)
    params = replace(GREEDY, max_tokens=3, n=2)
    failed = submit(loop, range(1, 9), params, "failed")
    waiting = [submit(loop, range(1, 9), params, str(i)) for i in range(2)]
    loop.step()
    model.during.append(RuntimeError("device lost"))
    loop.step()
    assert isinstance(failed.last.error, RuntimeError) and "device lost" in caplog.text
    assert failed.finish_reasons == {0: "error", 1: "error"}
    run(loop)
    for sink in waiting:
        assert sink.token_ids[0] == sink.token_ids[1] == text_of(range(1, 9), 3)
    counters = loop.metrics().counters
    assert (counters.num_failed_requests, counters.num_finished_requests) == (1, 2)
    assert_all_pages_return(loop)


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    model = Meddler()
    loop = make_loop(model)
    params = replace(GREEDY, max_tokens=3)
    failed = submit(loop, range(1, 9), params, "failed")
    other = submit(loop, range(1, 9), params, "other")
    model.during.append("nan")
    run(loop)
    assert isinstance(failed.last.error, EverycastError) and "NaN" in str(failed.last.error)
    assert other.token_ids[0] == text_of(range(1, 9), 3)
    assert_all_pages_return(loop)


class FailingSink(RecordingSink):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def on_token(self, choice_index: int, token_id: int) -> bool:
        if self.method == "on_token":
            raise ZeroDivisionError("hook")
        return super().on_token(choice_index, token_id)

    def on_output(self, output: RequestOutput) -> None:
        super().on_output(output)
        if self.method == "on_output":
            raise ZeroDivisionError("output")


@pytest.mark.parametrize("method", ["on_token", "on_output"])
def test_a_failing_sink_fails_its_request_alone(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    loop = make_loop()
    params = replace(GREEDY, max_tokens=6)
    failing = FailingSink(method)
    loop.submit(Request("failing", tuple(range(1, 9)), params), failing)
    other = submit(loop, range(1, 9), params, "other")
    run(loop)
    assert failing.finish_reasons == {0: "error" if method == "on_token" else "abort"}
    assert other.token_ids[0] == text_of(range(1, 9), 6)
    assert_all_pages_return(loop)


def test_a_fault_of_our_own_loses_the_requests_but_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    loop = make_loop()
    params = replace(GREEDY, max_tokens=6)
    lost = submit(loop, range(1, 9), params, "lost")
    loop.step()
    monkeypatch.setattr(loop.scheduler, "schedule", lambda budget: 1 // 0)
    loop.step()
    assert isinstance(lost.last.error, ZeroDivisionError)
    after = submit(loop, range(1, 9), params, "after")
    run(loop)
    assert after.token_ids[0] == text_of(range(1, 9), 6)
    assert_all_pages_return(loop)
