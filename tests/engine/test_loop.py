"""The engine's loop over a scripted model, step by step in this thread."""

import logging
import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from everycast.artifact.errors import EverycastError, RequestError
from everycast.engine.engine_config import ScheduleLimits
from everycast.engine.loop import EngineLoop
from everycast.engine.model_runner import StepInput
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.scripted_model import (
    RecordingSink,
    ScriptedModel,
    hash_script,
    script_after,
)
from everycast.engine.sequence import Request
from everycast.engine.token_sink import RequestOutput
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 50
EOS = 0
GREEDY = SamplingParams(temperature=0.0)


def make_loop(
    model: ScriptedModel | None = None,
    *,
    max_num_sequence: int = 4,
    chunk: int = 16,
    is_prefix_cache_enabled: bool = True,
    tokenizer_size: int | None = None,
    eos_token_ids: Iterable[int] = (EOS,),
) -> EngineLoop:
    model = model or make_model()
    info = model.info
    limits = ScheduleLimits(
        max_num_sequence=max_num_sequence,
        prefill_chunk_size=chunk,
        context_window_size=min(info.context_window_size, model.num_pages * info.page_size),
        page_size=info.page_size,
        num_pages=model.num_pages,
        is_prefix_cache_enabled=is_prefix_cache_enabled,
    )
    return EngineLoop(model, limits, tokenizer_size=tokenizer_size, eos_token_ids=eos_token_ids)


def make_model(
    *, num_pages: int = 64, page_size: int = 4, noise: float = 0.0, eos_every: int = 0
) -> ScriptedModel:
    script = hash_script(VOCAB, eos_token_id=EOS, eos_every=eos_every)
    return ScriptedModel(
        script, vocab_size=VOCAB, num_pages=num_pages, page_size=page_size, noise=noise
    )


def run(loop: EngineLoop, *, max_steps: int = 1000) -> int:
    """Steps until there is nothing to do."""
    for num_steps in range(max_steps + 1):
        if not loop.step():
            return num_steps
        loop.scheduler.check_integrity()
    raise AssertionError(f"still at work after {max_steps} steps")


def submit(
    loop: EngineLoop, prompt: Iterable[int], params: SamplingParams, name: str = "a"
) -> RecordingSink:
    sink = RecordingSink()
    loop.submit(Request(name, tuple(prompt), params), sink)
    return sink


def text_of(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """What the script says, without an engine."""
    script, history = hash_script(VOCAB), list(prompt)
    num_prompt_tokens = len(history)
    for _ in range(num_tokens):
        history.append(script(tuple(history)))
    return history[num_prompt_tokens:]


def assert_all_pages_return(loop: EngineLoop) -> None:
    pool = loop.scheduler.pool
    assert loop.metrics().num_available_pages == pool.num_pages
    loop.scheduler.prefix_cache.clear()
    pool.check_integrity([])
    assert pool.num_idle_pages == 0


# Ends


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_max_tokens_is_exact(num_tokens: int) -> None:
    loop = make_loop()
    sink = submit(loop, range(1, 11), replace(GREEDY, max_tokens=num_tokens))
    run(loop)
    assert sink.token_ids[0] == sink.heard[0] == text_of(range(1, 11), num_tokens)
    assert sink.finish_reasons == {0: "length"}
    assert sink.last.usage.num_output_tokens == num_tokens
    assert sink.last.usage.num_prompt_tokens == 10
    # The last token is never computed: 10 of the prompt, and the others of the output.
    assert loop._runner.num_tokens_computed == 10 + num_tokens - 1  # type: ignore[attr-defined]
    assert_all_pages_return(loop)


def test_no_max_tokens_runs_to_the_context() -> None:
    loop = make_loop(make_model(num_pages=5, page_size=4))
    sink = submit(loop, range(1, 11), GREEDY)
    run(loop)
    assert len(sink.token_ids[0]) == 10 and sink.finish_reasons == {0: "length"}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt_logprobs", [None, 2])
@pytest.mark.parametrize("num_prompt_tokens", [1, 30])
def test_max_tokens_zero(n: int, prompt_logprobs: int | None, num_prompt_tokens: int) -> None:
    loop = make_loop()
    params = replace(GREEDY, max_tokens=0, n=n, prompt_logprobs=prompt_logprobs)
    sink = submit(loop, range(1, num_prompt_tokens + 1), params)
    run(loop)
    assert sink.is_finished.is_set() and not sink.heard
    assert sink.finish_reasons == dict.fromkeys(range(n), "length")
    num_expected = 0 if prompt_logprobs is None else num_prompt_tokens - 1
    assert len(sink.prompt_logprobs) == num_expected
    assert sink.last.usage.num_output_tokens == 0
    assert_all_pages_return(loop)


def test_the_end_token_ends_and_is_not_shown_to_the_hook() -> None:
    model = ScriptedModel(script_after((7,), (10, 11), eos_token_id=EOS), vocab_size=VOCAB)
    loop = make_loop(model)
    sink = submit(loop, [1, 7], GREEDY)
    run(loop)
    assert sink.heard[0] == [10, 11] and sink.token_ids[0] == [10, 11, EOS]
    assert sink.finish_reasons == {0: "stop"}
    assert sink.last.choices[0].stop_token_id == EOS


def test_ignore_eos_and_stop_token_ids() -> None:
    model = ScriptedModel(script_after((7,), (EOS, 11, 12, 13), eos_token_id=EOS), vocab_size=VOCAB)
    loop = make_loop(model)
    sink = submit(loop, [7], replace(GREEDY, ignore_eos=True, stop_token_ids=(12,)))
    run(loop)
    assert sink.heard[0] == [EOS, 11] and sink.last.choices[0].stop_token_id == 12


def test_min_tokens_hold_the_end_back() -> None:
    model = ScriptedModel(lambda history: EOS, vocab_size=VOCAB)
    loop = make_loop(model)
    sink = submit(loop, [7], replace(GREEDY, min_tokens=3, max_tokens=9))
    run(loop)
    assert len(sink.heard[0]) == 3 and EOS not in sink.heard[0]
    assert sink.token_ids[0][3:] == [EOS] and sink.finish_reasons == {0: "stop"}


def test_the_hook_ends_a_choice_without_another_token() -> None:
    loop = make_loop()
    expected = text_of([1, 2, 3], 5)
    sink = RecordingSink(stops=[expected[4]])
    num_tokens = expected.index(expected[4]) + 1
    loop.submit(Request("a", (1, 2, 3), replace(GREEDY, max_tokens=num_tokens)), sink)
    run(loop)
    assert sink.token_ids[0] == expected[:num_tokens]
    assert sink.finish_reasons == {0: "stop"}  # and not "length", which is true as well
    assert loop._runner.num_tokens_computed == 3 + num_tokens - 1  # type: ignore[attr-defined]


def test_padded_ids_are_never_chosen() -> None:
    model = ScriptedModel(lambda history: 45, vocab_size=VOCAB, noise=1.0)
    loop = make_loop(model, tokenizer_size=40)
    greedy = submit(loop, [1, 2], replace(GREEDY, max_tokens=20, prompt_logprobs=3), "greedy")
    drawn = submit(loop, [1, 2], SamplingParams(seed=1, max_tokens=20), "drawn")
    run(loop)
    assert max(greedy.token_ids[0] + drawn.token_ids[0]) < 40
    assert all(i < 40 for item in greedy.prompt_logprobs for i, _ in item.top)


# Batches, forks, prefixes


def test_chunked_and_batched_texts_are_those_of_the_script() -> None:
    loop = make_loop(chunk=5)
    prompts = [range(1, 1 + length) for length in (1, 4, 5, 17, 33)]
    sinks = [
        submit(loop, prompt, replace(GREEDY, max_tokens=12), str(i))
        for i, prompt in enumerate(prompts)
    ]
    run(loop)
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.token_ids[0] == text_of(prompt, 12)
    assert_all_pages_return(loop)


def test_a_page_that_is_copied_from_and_then_to_is_copied_in_two_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = make_loop()
    calls: list[tuple[list[int], list[int]]] = []
    monkeypatch.setattr(loop._runner, "copy_pages", lambda *pages: calls.append(pages))
    loop._copy_pages([(0, 1), (2, 3), (4, 0), (5, 6)])
    assert calls == [([0, 2], [1, 3]), ([4, 5], [0, 6])]


def test_a_second_request_reuses_the_prefix_and_says_so() -> None:
    loop = make_loop()
    prompt = range(1, 14)
    first = submit(loop, prompt, replace(GREEDY, max_tokens=3), "a")
    run(loop)
    second = submit(loop, prompt, replace(GREEDY, max_tokens=3), "b")
    run(loop)
    assert first.last.usage.num_cached_tokens == 0
    assert second.last.usage.num_cached_tokens == 12
    assert first.token_ids == second.token_ids
    assert loop.metrics().num_prefix_hit_tokens == 12
    assert loop.metrics().num_cached_pages > 0


@pytest.mark.parametrize("num_prompt_tokens", [5, 8])
@pytest.mark.parametrize("max_num_sequence", [1, 2, 8])
def test_choices_of_one_seed_differ_and_repeat(
    num_prompt_tokens: int, max_num_sequence: int
) -> None:
    params = SamplingParams(seed=3, n=4, max_tokens=10, ignore_eos=True)
    results = []
    for _ in range(2):
        loop = make_loop(make_model(noise=8.0), max_num_sequence=max_num_sequence)
        sink = submit(loop, range(1, num_prompt_tokens + 1), params)
        run(loop)
        results.append(dict(sink.token_ids))
        assert sink.finish_reasons == dict.fromkeys(range(4), "length")
        assert sink.last.usage.num_output_tokens == 40
        assert_all_pages_return(loop)
    assert results[0] == results[1]
    assert len({tuple(tokens) for tokens in results[0].values()}) > 1


def test_a_seed_gives_the_same_text_alone_and_in_a_batch() -> None:
    params = SamplingParams(seed=11, temperature=0.9, max_tokens=12)

    def text(num_others: int, num_pages: int) -> list[int]:
        model = make_model(noise=8.0, num_pages=num_pages)
        loop = make_loop(model, max_num_sequence=8, chunk=9)
        for i in range(num_others):
            submit(loop, range(i + 1, i + 9), replace(params, seed=i), f"other {i}")
        sink = submit(loop, range(20, 29), params)
        run(loop)
        return sink.token_ids[0]

    alone = text(0, 64)
    assert text(0, 64) == text(7, 64) == text(7, 8) == alone  # with 8 pages: preemptions


def test_prompt_logprobs_are_those_of_the_script() -> None:
    loop = make_loop(chunk=256)
    prompt = [1, 2, *text_of([1, 2], 150)]
    wrong = 100
    prompt[wrong] = (prompt[wrong] + 1) % VOCAB
    sink = submit(loop, prompt, replace(GREEDY, max_tokens=2, prompt_logprobs=1, logprobs=True))
    run(loop)
    assert [item.token_id for item in sink.prompt_logprobs] == prompt[1:]
    likely = [item.logprob > -0.01 for item in sink.prompt_logprobs]
    assert all(likely[1 : wrong - 1]) and not likely[wrong - 1]
    assert sink.prompt_logprobs[wrong - 1].top[0][0] != prompt[wrong]
    first = next(output for output in sink.outputs if output.choices).choices[0].tokens[0]
    assert first.logprob is not None
    expected = -math.log1p((VOCAB - 1) * math.exp(-20.0))
    assert first.logprob.logprob == pytest.approx(expected, abs=1e-6)


# Refusals


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([1, VOCAB], GREEDY, "ids run from 0 to 49"),
        ([-1], GREEDY, "token id -1"),
        ([1] * 257, GREEDY, "257"),
        ([1] * 200, replace(GREEDY, max_tokens=57), "257"),
        ([1], replace(GREEDY, max_tokens=-1), "max_tokens"),
        ([1], replace(GREEDY, logit_bias={VOCAB: 1.0}), "logit_bias"),
    ],
)
def test_bad_requests_are_refused_and_the_next_one_succeeds(
    prompt: list[int], params: SamplingParams, message: str
) -> None:
    loop = make_loop()
    with pytest.raises(RequestError, match=message):
        submit(loop, prompt, params)
    sink = submit(loop, [1, 2], replace(GREEDY, max_tokens=2))
    run(loop)
    assert sink.token_ids[0] == text_of([1, 2], 2)


def test_an_id_in_use_is_refused_until_it_ends() -> None:
    loop = make_loop()
    params = replace(GREEDY, max_tokens=2)
    submit(loop, [1], params)
    with pytest.raises(RequestError, match="already running"):
        submit(loop, [1], params)
    run(loop)
    submit(loop, [1], params)


# Aborts and failures


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
    monkeypatch.setattr(loop.scheduler, "schedule", lambda: 1 // 0)
    loop.step()
    assert isinstance(lost.last.error, ZeroDivisionError)
    after = submit(loop, range(1, 9), params, "after")
    run(loop)
    assert after.token_ids[0] == text_of(range(1, 9), 6)
    assert_all_pages_return(loop)


def test_metrics_add_up() -> None:
    ticks = iter(range(1000))
    model = make_model()
    limits = make_loop().limits
    loop = EngineLoop(model, limits, clock=lambda: float(next(ticks)))
    submit(loop, range(1, 21), replace(GREEDY, max_tokens=4))
    num_steps = run(loop)
    counters = loop.metrics().counters
    assert counters.num_steps == num_steps == 2 + 3
    assert counters.num_prefill_tokens == 20 and counters.num_output_tokens == 4
    assert counters.step_time_s == 3 * num_steps and counters.execute_time_s == num_steps
    assert loop.metrics().num_pages == 64


# Everything at once


@st.composite
def requests(draw: st.DrawFn, context: int) -> Request:
    shared = draw(st.sampled_from([(), (1, 2, 3, 4, 5, 6), (1, 2, 3, 9)]))
    prompt = shared + tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=8)))
    max_tokens = draw(st.integers(0, 8) | st.none())
    if max_tokens is not None:
        max_tokens = min(max_tokens, context - len(prompt))
    return Request(
        "",
        prompt,
        SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            n=draw(st.sampled_from([1, 1, 2, 3])),
            max_tokens=max_tokens,
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        ),
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_traffic_gives_the_texts_of_running_alone(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 5), label="page_size")
    context = data.draw(st.integers(18, 30), label="context")
    num_pages = -(-context // page_size) + data.draw(st.integers(0, 8), label="spare pages")
    chunk = data.draw(st.integers(1, 12), label="chunk")
    loop = EngineLoop(
        make_model(num_pages=num_pages, page_size=page_size, noise=8.0, eos_every=12),
        ScheduleLimits(
            max_num_sequence=data.draw(st.integers(1, min(5, chunk)), label="max_num_sequence"),
            prefill_chunk_size=chunk,
            context_window_size=context,
            page_size=page_size,
            num_pages=num_pages,
            is_prefix_cache_enabled=data.draw(st.booleans(), label="prefix cache"),
        ),
        eos_token_ids=(EOS,),
    )
    arriving = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 12),  # step of arrival
                requests(context),
                st.none() | st.integers(0, 20),  # steps until its abort
            ),
            min_size=1,
            max_size=7,
        ),
        label="requests",
    )
    sinks: list[RecordingSink] = [RecordingSink() for _ in arriving]
    num_tokens = sum((context + 1) * request.params.n for _, request, _ in arriving)
    step = 0
    while not all(sink.is_finished.is_set() for sink in sinks):
        for i, (arrival, request, patience) in enumerate(arriving):
            if arrival == step:
                loop.submit(replace(request, request_id=str(i)), sinks[i])
            if patience is not None and arrival + patience == step:
                loop.abort(str(i))
        loop.step()
        loop.scheduler.check_integrity()
        step += 1
        # The oldest gets at least one token a step: nobody waits longer than for all of them.
        assert step <= 13 + num_tokens, "somebody starves"

    assert_all_pages_return(loop)
    for (_, request, patience), sink in zip(arriving, sinks, strict=True):
        alone = alone_texts(request, context)
        for choice_index in range(request.params.n):
            reason = sink.finish_reasons[choice_index]
            tokens = sink.token_ids[choice_index]
            if reason == "abort":
                assert patience is not None
                assert tokens == alone.token_ids[choice_index][: len(tokens)]
            else:
                assert reason == alone.finish_reasons[choice_index]
                assert tokens == alone.token_ids[choice_index]
        if "abort" not in sink.finish_reasons.values():
            assert len(sink.prompt_logprobs) == len(alone.prompt_logprobs)
            for item, expected in zip(sink.prompt_logprobs, alone.prompt_logprobs, strict=True):
                assert item.token_id == expected.token_id
                assert item.logprob == pytest.approx(expected.logprob, abs=1e-5)


def alone_texts(request: Request, context: int) -> RecordingSink:
    """The request on an engine of its own, with room for everything and no prefix cache."""
    limits = ScheduleLimits(
        max_num_sequence=8,
        prefill_chunk_size=64,
        context_window_size=context,
        page_size=64,
        num_pages=8,
        is_prefix_cache_enabled=False,
    )
    model = make_model(num_pages=8, page_size=64, noise=8.0, eos_every=12)
    loop = EngineLoop(model, limits, eos_token_ids=(EOS,))
    sink = RecordingSink()
    loop.submit(request, sink)
    run(loop)
    return sink
