import json
import math

import numpy as np
import pytest
from everycast.artifact.errors import EverycastError, RequestError
from everycast.engine.sampler import SequenceSampler, token_logprobs
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.token_filter import draw as draw_place
from everycast.engine.token_filter import keep_min_p, keep_top_k, keep_top_p
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 320
NUM_IDS = 300


def make_sampler(
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (),
    choice: int = 0,
    eos: tuple[int, ...] = (),
) -> SequenceSampler:
    return SequenceSampler(
        params,
        prompt_ids=prompt,
        vocab_size=VOCAB,
        tokenizer_size=NUM_IDS,
        eos_token_ids=eos,
        choice_index=choice,
    )


def make_logits(seed: int = 0, *, rows: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def draw(params: SamplingParams, logits: np.ndarray, count: int, *, choice: int = 0) -> list[int]:
    sampler = make_sampler(params, choice=choice)
    return [sampler.sample(logits).token_id for _ in range(count)]


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


SIZES = st.integers(1, 3000)
SPREADS = st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0])


def make_weights(seed: int, size: int, spread: float) -> np.ndarray:
    """Weights over many orders of magnitude, with many equal ones for a small `spread`."""
    exponents = np.random.default_rng(seed).standard_normal(size).round(2) * spread
    weights: np.ndarray = np.exp(exponents - exponents.max()).astype(np.float32)
    return weights


@given(seed=st.integers(0, 99), size=SIZES, spread=SPREADS, top_p=st.floats(0, 1))
def test_top_p_is_the_smallest_set(seed: int, size: int, spread: float, top_p: float) -> None:
    values = make_weights(seed, size, spread).astype(np.float64)
    kept = keep_top_p(values.astype(np.float32), top_p)
    missing, slack = top_p * values.sum(), 1e-9 * values.sum()
    assert np.all(np.diff(kept) > 0)
    assert values[kept].sum() >= missing - slack
    assert len(kept) == 1 or values[kept].sum() - values[kept].min() < missing + slack
    dropped = np.delete(values, kept)
    assert dropped.size == 0 or dropped.max() <= values[kept].min()


@given(seed=st.integers(0, 99), size=SIZES, spread=SPREADS, k=st.integers(1, 300))
def test_top_k_keeps_the_largest(seed: int, size: int, spread: float, k: int) -> None:
    values = make_weights(seed, size, spread)
    kept = keep_top_k(values, k)
    assert len(kept) == min(k, size) and np.all(np.diff(kept) > 0)
    assert np.array_equal(np.sort(values[kept]), np.sort(values)[-k:])


@given(
    seed=st.integers(0, 99),
    size=SIZES,
    spread=SPREADS,
    uniform=st.floats(0, 1, exclude_max=True) | st.just(np.nextafter(1, 0)),
)
def test_draw_inverts_the_cumulative_sum(
    seed: int, size: int, spread: float, uniform: float
) -> None:
    weights = make_weights(seed, size, spread)
    weights[np.random.default_rng(seed).random(size) < 0.3] = 0
    if not weights.any():
        weights[0] = 1
    place = draw_place(weights, uniform)
    cumulative = np.cumsum(weights, dtype=np.float64)
    slack = 1e-9 * cumulative[-1]
    assert weights[place] > 0
    target = uniform * cumulative[-1]
    assert cumulative[place] - weights[place] - slack <= target <= cumulative[place] + slack


def test_filters_work_on_what_others_left() -> None:
    values = np.array([1, 8, 4, 2, 1], dtype=np.float32)
    assert keep_min_p(values, 0.25).tolist() == [1, 2, 3]
    some = np.array([0, 2, 3, 4])
    assert keep_min_p(values, 0.5, some).tolist() == [2, 3]
    assert keep_top_k(values, 2, some).tolist() == [2, 3]
    assert keep_top_p(values, 0.5, some).tolist() == [2]
    assert keep_top_p(values, 0.51, some).tolist() == [2, 3]


def test_greedy_is_the_arg_max_and_the_lowest_of_equals() -> None:
    logits = make_logits(rows=4)
    logits[1, [7, 9]] = 50
    ids = [draw(SamplingParams(temperature=0), row, 1)[0] for row in logits]
    assert ids == logits[:, :NUM_IDS].argmax(axis=1).tolist()
    assert ids[1] == 7


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
    in_batch = [
        [sampler.sample(row).token_id for sampler, row in zip(samplers, logits, strict=True)][3]
        for _ in range(20)
    ]
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
    ids = [sampler.sample(logits).token_id for _ in range(3)]
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
    assert [sampler.sample(logits).token_id for _ in range(3)] == [0, 3, 0]
    negative = np.full(VOCAB, -5.0, dtype=np.float32)
    negative[[8, 9]] = [-1.0, -1.5]
    assert make_sampler(params, prompt=(8,)).sample(negative).token_id == 9


def test_logits_are_left_alone() -> None:
    logits = make_logits()[0]
    before = logits.copy()
    draw(SamplingParams(logit_bias={1: 5.0}, repetition_penalty=1.5, presence_penalty=1), logits, 3)
    assert np.array_equal(before, logits)


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
    token = make_sampler(params).sample(logits)
    assert token.logprob is not None
    assert token.logprob.token_id == token.token_id
    assert token.logprob.logprob == pytest.approx(reference[token.token_id], abs=1e-5)
    best = np.argsort(-reference)[:5]
    assert [i for i, _ in token.logprob.top] == best.tolist()
    assert [p for _, p in token.logprob.top] == pytest.approx(reference[best].tolist(), abs=1e-5)


def test_logprobs_are_always_json_numbers() -> None:
    logits = np.full((2, VOCAB), -np.inf, dtype=np.float32)
    logits[:, 4] = 1.0
    results = token_logprobs(logits, [4, 5], num_top=3, tokenizer_size=NUM_IDS)
    assert [result.logprob for result in results] == [0.0, -9999.0]
    text = json.dumps([result.top for result in results], allow_nan=False)
    assert "-9999.0" in text


def test_logits_that_are_no_numbers_are_an_error() -> None:
    logits = make_logits()[0]
    logits[3] = np.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(EverycastError, match="not numbers"):
            make_sampler(SamplingParams(temperature=temperature)).sample(logits)


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
