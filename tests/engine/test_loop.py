"""The loop: ends, batches, forks, prefixes, refusals."""

from dataclasses import replace

import pytest
from everycast.artifact.errors import RequestError
from everycast.engine.loop import EngineLoop
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.scripted_model import (
    RecordingSink,
    ScriptedModel,
    script_after,
)
from everycast.engine.sequence import Request
from scripted_loop import (
    EOS,
    GREEDY,
    VOCAB,
    assert_all_pages_return,
    make_loop,
    make_model,
    run,
    submit,
    text_of,
)


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
    assert first.logprob.logprob == pytest.approx(0, abs=1e-6)


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
