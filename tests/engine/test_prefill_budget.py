"""How long sequences stand still beside a prompt, over a model whose time is made up."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from everycast.engine.engine_config import ScheduleLimits
from everycast.engine.loop import EngineLoop
from everycast.engine.model_runner import StepInput
from everycast.engine.prefill_budget import LEAST_TOKENS, LONGEST_STEP_S
from everycast.engine.scripted_model import ScriptedModel, hash_script
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_loop import GREEDY, VOCAB, run, submit, text_of

STEP_TOKENS = 512
PROMPT = [1 + i % 40 for i in range(8 * STEP_TOKENS)]


class TimedModel(ScriptedModel):
    """`clock` goes on by what a step takes: seconds(its tokens)."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__(
            hash_script(VOCAB), vocab_size=VOCAB, num_pages=1024, context_window_size=8192,
            prefill_chunk_size=STEP_TOKENS,
        )  # fmt: skip
        self.now = 0.0
        self.steps: list[tuple[int, float]] = []
        """(tokens, seconds)"""
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def execute(self, step: StepInput) -> np.ndarray:
        self.steps.append((len(step.input_ids), self._seconds(len(step.input_ids))))
        self.now += self.steps[-1][1]
        return super().execute(step)


def make_loop(model: TimedModel, step_tokens: int = STEP_TOKENS) -> EngineLoop:
    info = model.info
    limits = ScheduleLimits(
        max_num_sequence=min(8, step_tokens),
        prefill_chunk_size=step_tokens,
        context_window_size=info.context_window_size,
        page_size=info.page_size,
        num_pages=model.num_pages,
    )
    return EngineLoop(model, limits, clock=model.clock)


def steps_beside_a_prompt(seconds: Callable[[int], float]) -> list[tuple[int, float]]:
    """(prompt's tokens, seconds) of the steps in which a sequence decodes beside a long prompt."""
    model = TimedModel(seconds)
    loop = make_loop(model)
    submit(loop, [1, 2, 3], replace(GREEDY, max_tokens=200), "decodes")
    loop.step()
    submit(loop, PROMPT, replace(GREEDY, max_tokens=1), "prompt")
    run(loop)
    beside = [(tokens - 1, took) for tokens, took in model.steps[1:] if tokens > 1]
    assert sum(tokens for tokens, _ in beside) == len(PROMPT)
    return beside


@pytest.mark.parametrize("tokens_per_s", [1_700, 3_000, 4_500, 9_000])
def test_a_sequence_waits_no_longer_than_the_step_may_take(tokens_per_s: int) -> None:
    seconds = [s for _, s in steps_beside_a_prompt(lambda tokens: tokens / tokens_per_s)]
    # The first budget may be too large.
    assert max(seconds[1:]) < LONGEST_STEP_S


def test_a_fast_device_takes_whole_steps() -> None:
    sizes = [tokens for tokens, _ in steps_beside_a_prompt(lambda tokens: 5e-3 + tokens / 50_000)]
    assert sizes[:3] == [128, 256, STEP_TOKENS - 1] and set(sizes[3:-1]) == {STEP_TOKENS - 1}


def test_a_slow_one_takes_no_less_than_the_least() -> None:
    sizes = [tokens for tokens, _ in steps_beside_a_prompt(lambda tokens: tokens / 100)]
    assert sizes[0] == 128 and set(sizes[1:-1]) == {LEAST_TOKENS}


def test_one_that_stood_still_does_not_make_all_later_ones_small() -> None:
    stalls = iter([0.3])
    sizes = [
        tokens
        for tokens, _ in steps_beside_a_prompt(
            lambda tokens: tokens / 4_500 + (next(stalls, 0.0) if tokens > 100 else 0.0)
        )
    ]
    assert sizes[:3] == [128, 64, 128] and set(sizes[3:-1]) == {128}


def test_where_nobody_waits_the_step_is_whole() -> None:
    model = TimedModel(lambda tokens: tokens / 1_000)
    loop = make_loop(model)
    submit(loop, PROMPT, replace(GREEDY, max_tokens=1))
    run(loop)
    assert {tokens for tokens, _ in model.steps} == {STEP_TOKENS}


def test_steps_smaller_than_the_least_budget() -> None:
    model = TimedModel(lambda tokens: tokens / 10)
    loop = make_loop(model, step_tokens=16)
    sinks = [submit(loop, PROMPT[:100], replace(GREEDY, max_tokens=9), name) for name in "ab"]
    run(loop)
    assert all(sink.token_ids[0] == text_of(PROMPT[:100], 9) for sink in sinks)
    assert max(tokens for tokens, _ in model.steps) == 16


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0.001, 0.02, 0.04, 0.2]), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 700)), min_size=1, max_size=6),
)
def test_the_text_does_not_depend_on_what_steps_take(
    times: list[float], prompts: list[tuple[int, int]]
) -> None:
    """prompts: (step of arrival, tokens)"""
    course = iter(times)
    model = TimedModel(lambda tokens: next(course, 0.03))
    loop = make_loop(model)
    sinks = {}
    for step in range(7):
        for i, (arrival, length) in enumerate(prompts):
            if arrival == step:
                params = replace(GREEDY, max_tokens=12)
                sinks[i] = submit(loop, PROMPT[i : i + length], params, str(i))
        loop.step()
        loop.scheduler.check_integrity()
    run(loop)
    for i, (_, length) in enumerate(prompts):
        assert sinks[i].token_ids[0] == text_of(PROMPT[i : i + length], 12)
