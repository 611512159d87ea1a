import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from everycast.artifact.errors import RequestError
from everycast.engine import numpy_sampling
from everycast.engine.model_runner import SampleInput, SampleOutput, TokenParts
from everycast.engine.row_sampling import sample_rows
from everycast.engine.sampler import (
    SampledToken,
    SequenceSampler,
    TokenLogprob,
    sample_tokens,
    token_logprobs,
    uniform_at,
)
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.seen_tokens import SeenTokens
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 320
NUM_IDS = 300


class OneStep:
    """The sampling side of a model runner after a step that gave these logits, [rows, VOCAB]."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits.copy()

    def sample(self, draws: SampleInput) -> SampleOutput:
        return sample_rows(numpy_sampling, self.logits, draws)

    def logprobs(
        self, rows: np.ndarray, token_ids: np.ndarray, *, num_ids: int, num_top: int
    ) -> TokenParts:
        return numpy_sampling.token_logprobs(self.logits, rows, token_ids, num_ids, num_top)


def make_sampler(
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (),
    choice: int = 0,
    eos: tuple[int, ...] = (),
) -> SequenceSampler:
    return SequenceSampler(
        params, prompt_ids=prompt, num_ids=NUM_IDS, eos_token_ids=eos, choice_index=choice
    )


def make_logits(seed: int = 0, *, rows: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def sample_step(logits: np.ndarray, samplers: Sequence[SequenceSampler]) -> list[SampledToken]:
    """One token of each sampler, sampler i from row i."""
    tokens = sample_tokens(OneStep(logits), [*enumerate(samplers)], num_ids=NUM_IDS)
    assert all(token is not None for token in tokens)
    return [token for token in tokens if token is not None]


def sample(sampler: SequenceSampler, logits: np.ndarray) -> SampledToken:
    return sample_step(logits[None], [sampler])[0]


def draw(params: SamplingParams, logits: np.ndarray, count: int, *, choice: int = 0) -> list[int]:
    sampler = make_sampler(params, choice=choice)
    return [sample(sampler, logits).token_id for _ in range(count)]


def logprobs_of(logits: np.ndarray, token_ids: list[int], num_top: int) -> list[TokenLogprob]:
    rows = range(len(token_ids))
    return token_logprobs(OneStep(logits), rows, token_ids, num_ids=NUM_IDS, num_top=num_top)


def reference_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution by sorting, as vLLM defines it: temperature, min_p, top_k, top_p."""
    scaled = logits[:NUM_IDS].astype(np.float64) / params.temperature
    probabilities: np.ndarray = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    order = np.argsort(-probabilities, kind="stable")
    if params.top_k > 0:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= params.top_p]] = 0
    probabilities /= probabilities.sum()
    return probabilities


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.7),
        SamplingParams(seed=3, temperature=1.5, top_p=0.8),
        SamplingParams(seed=4, top_k=20),
        SamplingParams(seed=5, min_p=0.05),
        SamplingParams(seed=6, temperature=1.3, top_k=50, top_p=0.9, min_p=0.01),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over the ids that are expected often enough; the rest is one class."""
    logits = make_logits()[0]
    count = 4000
    expected = reference_probabilities(logits, params) * count
    observed = np.bincount(draw(params, logits, count), minlength=NUM_IDS)
    assert not observed[expected == 0].any()
    is_common = expected >= 5
    classes = np.append(observed[is_common], observed[~is_common].sum())
    means = np.append(expected[is_common], max(expected[~is_common].sum(), 1e-9))
    chi_square = float(((classes - means) ** 2 / means).sum())
    freedom = len(classes) - 1
    # Wilson and Hilferty: the cube root is nearly normal. 4 sigma; the seeds are fixed.
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4


def test_greedy_is_the_arg_max_and_the_lowest_of_equals() -> None:
    logits = make_logits(rows=4)
    logits[1, [7, 9]] = 50
    ids = [draw(SamplingParams(temperature=0), row, 1)[0] for row in logits]
    assert ids == logits[:, :NUM_IDS].argmax(axis=1).tolist()
    assert ids[1] == 7


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, True),
        ({"max_tokens": 5, "stop": ("x",), "ignore_eos": True}, True),
        ({"temperature": 0.7}, False),
        ({"logprobs": True}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
    ],
)
def test_which_draws_need_the_arg_max_alone(params: dict[str, Any], expected: bool) -> None:
    sampler = make_sampler(SamplingParams(**{"temperature": 0.0, **params}), eos=(7,))
    assert sampler.takes_arg_max is expected


def test_the_end_is_forbidden_in_the_logits_at_first_only() -> None:
    sampler = make_sampler(SamplingParams(temperature=0.0, min_tokens=2), eos=(7,))
    seen = []
    for _ in range(3):
        seen.append(sampler.takes_arg_max)
        sampler.accept(1)
    assert seen == [False, False, True]


def test_padded_ids_are_never_sampled() -> None:
    logits = make_logits()[0]
    logits[310] = 100
    assert draw(SamplingParams(temperature=0), logits, 1)[0] < NUM_IDS
    assert max(draw(SamplingParams(seed=1, temperature=2.0), logits, 300)) < NUM_IDS


def test_seed_alone_decides() -> None:
    logits = make_logits(rows=8)
    params = SamplingParams(seed=7, temperature=0.9)
    alone = draw(params, logits[3], 20)
    assert alone == draw(params, logits[3], 20)
    samplers = [
        make_sampler(params if i == 3 else SamplingParams(seed=i, top_p=0.5)) for i in range(8)
    ]
    in_batch = [sample_step(logits, samplers)[3].token_id for _ in range(20)]
    assert in_batch == alone
    choices = [draw(params, logits[3], 20, choice=i) for i in range(4)]
    assert choices[0] == alone
    assert len({tuple(choice) for choice in choices}) == 4
    assert draw(SamplingParams(), logits[3], 20) != draw(SamplingParams(), logits[3], 20)
    assert draw(SamplingParams(seed=-1), logits[3], 5) == draw(
        SamplingParams(seed=-1), logits[3], 5
    )


def test_min_tokens_forbids_the_end() -> None:
    logits = make_logits()[0]
    logits[[5, 6]] = 100
    sampler = make_sampler(
        SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(6,)), eos=(5,)
    )
    ids = [sample(sampler, logits).token_id for _ in range(3)]
    assert ids[0] not in (5, 6) and ids[1] not in (5, 6) and ids[2] == 5


def test_logit_bias() -> None:
    logits = make_logits()[0]
    best = int(logits[:NUM_IDS].argmax())
    assert draw(SamplingParams(temperature=0, logit_bias={17: 100.0}), logits, 3) == [17] * 3
    assert draw(SamplingParams(temperature=0, logit_bias={best: -100.0}), logits, 1) != [best]


def test_penalties_follow_their_definitions() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[:4] = [3.0, 2.5, -1.0, 2.0]
    params = SamplingParams(temperature=0, presence_penalty=0.4, frequency_penalty=0.5)
    # 0: 3.0, then 3 - 0.9 = 2.1; 1: 2.5, then 1.6; 0: 3 - 1.4 = 1.6 but 3 has 2.0.
    assert draw(params, logits, 4) == [0, 1, 0, 3]
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    sampler = make_sampler(params, prompt=(1, 2, 319))
    # 1 is in the prompt (1.25); 0 becomes 1.5 after it was written, 3 becomes 1.0.
    assert [sample(sampler, logits).token_id for _ in range(3)] == [0, 3, 0]
    negative = np.full(VOCAB, -5.0, dtype=np.float32)
    negative[[8, 9]] = [-1.0, -1.5]
    assert sample(make_sampler(params, prompt=(8,)), negative).token_id == 9


def test_each_row_has_its_own_bias_and_penalties() -> None:
    logits = np.tile(make_logits()[0], (6, 1))
    best = np.argsort(-logits[0, :NUM_IDS])[:3].tolist()
    greedy = SamplingParams(temperature=0)
    samplers = [
        make_sampler(greedy),
        make_sampler(SamplingParams(temperature=0, logit_bias={best[0]: -50.0, 7: -1.0})),
        make_sampler(SamplingParams(temperature=0, repetition_penalty=100.0), prompt=(best[0],)),
        make_sampler(greedy),
        make_sampler(SamplingParams(temperature=0, min_tokens=1), eos=(best[0], best[1])),
        make_sampler(SamplingParams(temperature=0, presence_penalty=0.1)),
    ]
    expected = [best[0], best[1], best[1], best[0], best[2], best[0]]
    assert [token.token_id for token in sample_step(logits, samplers)] == expected


def test_choices_share_the_row_of_their_prompt() -> None:
    """Its biases count once: 6 becomes 2.6, where twice would make it the highest."""
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [5, 6]] = [3.0, 2.0]
    params = SamplingParams(temperature=0, logit_bias={6: 0.6}, n=2)
    draws = [(1, make_sampler(params, choice=i)) for i in range(2)]
    tokens = sample_tokens(OneStep(logits), draws, num_ids=NUM_IDS)
    assert [token and token.token_id for token in tokens] == [5, 5]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=0, top_p=0.1, logprobs=True, top_logprobs=5),
        SamplingParams(seed=0, top_k=1, logprobs=True, top_logprobs=5),
        SamplingParams(temperature=0, logprobs=True, top_logprobs=5),
        SamplingParams(
            seed=0, temperature=1.7, logit_bias={3: 50.0}, logprobs=True, top_logprobs=5
        ),
    ],
)
def test_logprobs_are_those_of_the_raw_logits(params: SamplingParams) -> None:
    logits = make_logits()[0]
    logits[[20, 21]] = -np.inf
    rows = logits[:NUM_IDS].astype(np.float64)
    reference = rows - np.log(np.exp(rows).sum())
    token = sample(make_sampler(params), logits)
    assert token.logprob is not None
    assert token.logprob.token_id == token.token_id
    assert token.logprob.logprob == pytest.approx(reference[token.token_id], abs=1e-5)
    best = np.argsort(-reference)[:5]
    assert [i for i, _ in token.logprob.top] == best.tolist()
    assert [p for _, p in token.logprob.top] == pytest.approx(reference[best].tolist(), abs=1e-5)


def test_logprobs_are_always_json_numbers() -> None:
    logits = np.full((2, VOCAB), -np.inf, dtype=np.float32)
    logits[:, 4] = 1.0
    results = logprobs_of(logits, [4, 5], 3)
    assert [result.logprob for result in results] == [0.0, -9999.0]
    text = json.dumps([result.top for result in results], allow_nan=False)
    assert "-9999.0" in text


def test_a_bias_does_not_change_the_log_probabilities_of_others() -> None:
    """Of three rows two report; the second is changed before it is drawn from."""
    logits = make_logits(rows=3)
    wants = {"temperature": 0, "logprobs": True}
    samplers = [
        make_sampler(SamplingParams(temperature=0)),
        make_sampler(SamplingParams(**wants, top_logprobs=2, logit_bias={9: 80.0})),
        make_sampler(SamplingParams(**wants, top_logprobs=1)),
    ]
    tokens = sample_step(logits, samplers)
    assert tokens[0].logprob is None and tokens[1].token_id == 9
    reference = logprobs_of(logits, [tokens[0].token_id, 9, tokens[2].token_id], 2)
    assert tokens[1].logprob == reference[1]
    assert tokens[2].logprob is not None and tokens[2].logprob.top == reference[2].top[:1]


def test_logits_that_are_no_numbers_give_no_token() -> None:
    logits = make_logits(rows=3)
    logits[1, 3] = np.nan
    for temperature in (0.0, 1.0):
        samplers = [
            make_sampler(SamplingParams(temperature=temperature, logprobs=True)) for _ in range(3)
        ]
        tokens = sample_tokens(OneStep(logits), [*enumerate(samplers)], num_ids=NUM_IDS)
        assert [token is None for token in tokens] == [False, True, False]
        assert [sampler.num_sampled for sampler in samplers] == [1, 0, 1]
    assert logprobs_of(logits, [1, 1, 1], 2)[1] == TokenLogprob(1, -9999.0, ())


def test_uniform_numbers_are_uniform_and_independent() -> None:
    """Chi-square of pairs of successive numbers, and of numbers at one place of many streams."""
    keys = [make_sampler(SamplingParams(seed=seed))._key for seed in range(1000)]
    assert len(set(keys)) == 1000
    along = np.array([uniform_at(keys[0], i) for i in range(20_000)])
    across = np.array([uniform_at(key, place) for key in keys for place in range(20)])
    for values in (along, across):
        assert values.min() >= 0 and values.max() < 1
        cells = (values[:-1] * 16).astype(int) * 16 + (values[1:] * 16).astype(int)
        observed = np.bincount(cells, minlength=256)
        expected = len(cells) / 256
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        # 255 degrees of freedom, 4 sigma.
        assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


def test_the_stream_is_that_of_splitmix64() -> None:
    """The first numbers of the published generator with seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    drawn = [uniform_at(1234567, i) for i in range(3)]
    assert drawn == [(value >> 11) * 2.0**-53 for value in expected]


@given(
    st.lists(st.integers(0, 50), max_size=60),
    st.lists(st.integers(0, 50), max_size=200),
)
def test_seen_tokens_are_counted(prompt: list[int], output: list[int]) -> None:
    seen = SeenTokens(prompt)
    for token_id in output:
        seen.add_output(token_id)
    assert seen.ids.dtype == seen.counts.dtype == np.int32
    counts = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
    assert len(counts) == len(seen.ids)
    assert counts == {token_id: output.count(token_id) for token_id in {*prompt, *output}}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=math.inf), "temperature"),
        (SamplingParams(top_p=1.1), "top_p"),
        (SamplingParams(min_p=-0.1), "min_p"),
        (SamplingParams(top_k=-2), "top_k"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(presence_penalty=2.1), "presence_penalty"),
        (SamplingParams(frequency_penalty=-2.1), "frequency_penalty"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={NUM_IDS: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={1: 101.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(VOCAB,)), "stop_token_ids"),
        (SamplingParams(stop=("a", "")), "stop"),
        (SamplingParams(n=0), "n"),
        (SamplingParams(n=129), "n"),
        (SamplingParams(logprobs=True, top_logprobs=21), "top_logprobs"),
        (SamplingParams(top_logprobs=2), "top_logprobs"),
        (SamplingParams(prompt_logprobs=-1), "prompt_logprobs"),
        (SamplingParams(max_tokens=-1), "max_tokens"),
        (SamplingParams(min_tokens=-1), "min_tokens"),
        (SamplingParams(min_tokens=5, max_tokens=4), "min_tokens"),
    ],
)
def test_values_outside_their_range_are_named(params: SamplingParams, param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        params.validate(VOCAB, NUM_IDS)
    assert caught.value.param == param


def test_allowed_values_pass() -> None:
    SamplingParams().validate(VOCAB, NUM_IDS)
    SamplingParams(
        temperature=0, top_p=0, top_k=-1, max_tokens=0, logit_bias={NUM_IDS - 1: -100}, stop=("x",)
    ).validate(VOCAB, NUM_IDS)
