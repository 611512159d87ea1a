"""Random traffic gives the texts of running alone."""

from dataclasses import replace

import pytest
from everycast.engine.engine_config import ScheduleLimits
from everycast.engine.loop import EngineLoop
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.scripted_model import (
    RecordingSink,
)
from everycast.engine.sequence import Request
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_loop import EOS, assert_all_pages_return, make_model, run


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
