"""The sampling kernels against their definition in NumPy, over odd sizes and hard logits."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from everycast.engine import numpy_sampling as oracle
from everycast.engine.device_sampling import device_settings, token_parts
from everycast.schedules.gpu.limits import GemmTile, GpuLimits
from everycast.schedules.gpu.sampling import sampling_functions
from hypothesis import HealthCheck, given, settings
from sampling_cases import (
    ANY_FILTERS,
    ANY_LOGITS,
    FILTERS,
    assert_drawn_at,
    assert_follows_distribution,
    hard_rows,
    interval_middles,
    kept_weights,
    random_logits,
    setting,
)

SIZES = (1, 7, 1000, 49152, 151936)
SMALL = 1000
LEAST = GpuLimits(
    max_threads=64, shared_bytes=16 << 10, gemv_threads=64, attention_threads=64,
    gemm_tiles=(GemmTile(16, 32, 32, 4, 4), GemmTile(32, 32, 32, 4, 4)),
)  # fmt: skip


@functools.cache
def function(name, size, limits):
    return sampling_functions(size, limits)[name]


def sample(gpu, logits, rows, values, num_ids=None):
    """As `oracle.sample_from_logits`."""
    rows, num_ids = np.array(rows, "int32"), logits.shape[1] if num_ids is None else num_ids
    func = function("sample_from_logits", logits.shape[1], gpu.limits)
    words = device_settings(np.array(values, float).reshape(-1, 5))
    return gpu.run(func, logits, rows, words, num_ids, np.full(len(rows), -7, "int32"))[-1]


def checks_of(row, filters):
    """(settings, the token each must draw): in the middle of the interval of ids that the oracle
    keeps, and at the start."""
    kept, weights = kept_weights(row, **filters)
    some, middles = interval_middles(weights, 4, 3997)
    values = [setting(u, **filters) for u in (0.0, *middles)]
    return values, [kept[weights > 1e-12][0], *kept[some]]


@pytest.mark.parametrize("size", SIZES)
def test_greedy_is_the_arg_max_and_the_lowest_of_equals(gpu, size):
    rows = hard_rows(size)
    drawn = sample(gpu, rows, [*range(7)], [setting(temperature=0)] * 7)
    assert drawn.tolist() == rows.argmax(axis=1).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_draws_are_those_of_the_oracle(gpu, size):
    logits, rows, values, expected = hard_rows(size), [], [], []
    for number, row in enumerate(logits):
        for filters in FILTERS if size <= SMALL else FILTERS[number % 3 :: 3]:
            more_values, more_tokens = checks_of(row, filters)
            rows += [number] * len(more_values)
            values += more_values
            expected += more_tokens
    assert sample(gpu, logits, rows, values).tolist() == expected


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(**ANY_LOGITS, **ANY_FILTERS)
def test_any_row_and_filters(gpu, seed, spread, decimals, **filters):
    row = random_logits(SMALL, seed, spread=spread)[0].round(decimals)
    uniforms = (0.37, 0.999)
    drawn = sample(gpu, row[None], [0, 0], [setting(u, **filters) for u in uniforms])
    assert_drawn_at(row, drawn, uniforms, **filters)


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 1.3, "top_k": 60, "top_p": 0.95}, {"temperature": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_ten_thousand_draws_follow_the_distribution(gpu, filters):
    row = random_logits(SMALL, 5, spread=1.0)
    uniforms = np.random.default_rng(1).random(10_000)
    drawn = sample(gpu, row, [0] * 10_000, [setting(u, **filters) for u in uniforms])
    assert_follows_distribution(row[0], drawn, **filters)


def test_a_draw_does_not_depend_on_the_others_nor_on_the_number_of_threads(gpu):
    logits = random_logits(SMALL, rows=9)
    filters = zip(
        np.linspace(0, 0.999, 27), [0.3, 0.9, 1.0] * 9, [0, 0, 0, 50] * 6 + [7] * 3, strict=True
    )
    values = [setting(u, temperature=1.5, top_p=p, top_k=k) for u, p, k in filters]
    rows = [*range(9)] * 3
    together = sample(gpu, logits, rows, values)
    alone = [sample(gpu, logits[r : r + 1], [0], [v])[0] for r, v in zip(rows, values, strict=True)]
    assert together.tolist() == alone
    least = SimpleNamespace(run=gpu.run, limits=LEAST)
    assert sample(least, logits, rows, values).tolist() == alone


@pytest.mark.parametrize("size", SIZES[:3])
def test_padding_is_never_drawn(gpu, size):
    num_ids = max(1, size - size // 3)
    logits = random_logits(size)
    logits[:, num_ids:] = 1e30
    for filters in ({"temperature": 0}, {"temperature": 50.0}, {"top_k": 3}, {"top_p": 0.99}):
        values = [setting(u, **filters) for u in np.linspace(0, 0.9999, 20)]
        drawn = sample(gpu, logits, [0] * 20, values, num_ids)
        assert 0 <= drawn.min() and drawn.max() < num_ids


@pytest.mark.parametrize("size", SIZES[:4])
def test_what_is_not_a_number_is_found(gpu, size):
    rows = random_logits(size, rows=7)
    rows[0, size // 2] = np.nan
    rows[1, -1] = np.inf
    rows[2] = -np.inf
    rows[3, 0] = -np.nan
    rows[4, 0] = np.nan
    rows[4, -1] = 100.0
    rows[5, 0] = -np.nan
    rows[5, -1] = 100.0
    for filters in ({"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}):
        drawn = sample(gpu, rows, [*range(7)], [setting(0.5, **filters)] * 7)
        # Rows 4 and 5 of one id are only the 100.
        assert (drawn < 0).tolist() == [True] * 4 + [size > 1] * 2 + [False]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_top", [1, 5, 20])
def test_log_probabilities(gpu, size, num_top):
    logits = np.concatenate([hard_rows(size), np.full((1, size), np.nan, "float32")])
    rows = np.array([*range(8), 0], "int32")
    token_ids = np.random.default_rng(3).integers(0, size, 9).astype("int32")
    expected = oracle.token_logprobs(logits, rows, token_ids, size, num_top)
    # Tokens in another order, among others, one of which was not drawn.
    picks = np.random.default_rng(4).permutation(12)[:9].astype("int32")
    drawn = np.full(12, -1, "int32")
    drawn[picks] = np.where(token_ids == 0, -1, token_ids)
    outputs = [
        np.full((9, 4), 7, "int32"), np.full((9, num_top), 7, "int32"),
        np.full((9, num_top), 7, "float32"),
    ]  # fmt: skip
    func = function("token_logprobs", size, gpu.limits)
    *_, words, top_ids, top_logits = gpu.run(func, logits, rows, picks, drawn, size, *outputs)
    found = token_parts([words, top_ids, top_logits], num_top)
    np.testing.assert_allclose(found.parts, expected.parts, rtol=1e-6)
    assert found.top_ids.tolist() == expected.top_ids.tolist()
    assert np.array_equal(found.top_logits, expected.top_logits)


def test_the_sum_of_very_different_logits_is_that_of_the_highest(gpu):
    logits = np.array([[3e38, -3e38, 0.0]], "float32")
    assert sample(gpu, logits, [0], [setting(0.999, temperature=1e10)]).tolist() == [0]


@pytest.mark.parametrize("size", SIZES[:4])
def test_bias_and_back(gpu, size):
    logits = random_logits(size, rows=3)
    rng = np.random.default_rng(0)
    count = min(size, 400)
    rows = np.repeat([2, 0], count).astype("int32")
    ids = np.concatenate([rng.permutation(size)[:count] for _ in range(2)]).astype("int32")
    bias = rng.standard_normal(2 * count).astype("float32")
    bias[0] = -np.inf
    run = functools.partial(_change, gpu, size)
    *_, saved = run("take_logits", logits, rows, ids, np.full(2 * count, np.nan, "float32"))
    assert np.array_equal(saved, logits[rows, ids])
    changed, *_ = run("apply_logit_bias_inplace", logits, rows, ids, bias)
    expected = logits.copy()
    oracle.apply_logit_bias_inplace(expected, rows, ids, bias)
    assert np.array_equal(changed, expected)
    assert np.array_equal(run("put_logits", changed, rows, ids, saved)[0], logits)


def _change(gpu, size, name, *arrays):
    return gpu.run(function(name, size, gpu.limits), *arrays)


@pytest.mark.parametrize("size", SIZES[:4])
def test_penalties(gpu, size):
    logits = random_logits(size, rows=4)
    logits[3, 0] = -np.inf
    rng = np.random.default_rng(0)
    count = min(size, 5000)
    ids = np.concatenate([rng.permutation(size)[:count] for _ in range(2)]).astype("int32")
    arrays = (
        np.array([3, 1], "int32"), np.repeat([0, 1], count).astype("int32"), ids,
        rng.integers(0, 4, 2 * count).astype("int32"),
        np.array([[0.5, 0.3, 1.2], [-0.5, -0.1, 0.7]], "float32"),
    )  # fmt: skip
    changed, *_ = _change(gpu, size, "apply_penalty_inplace", logits, *arrays)
    oracle.apply_penalty_inplace(logits, *arrays)
    np.testing.assert_allclose(changed, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", SIZES[:4])
def test_bitmask(gpu, size):
    logits = random_logits(size, rows=3)
    words = -(-size // 32)
    mask = np.random.default_rng(0).integers(-(2**31), 2**31, (2, words)).astype("int32")
    rows = np.array([2, 0], "int32")
    changed, *_ = _change(gpu, size, "apply_bitmask_inplace", logits, rows, mask)
    oracle.apply_bitmask_inplace(logits, rows, mask)
    assert np.array_equal(changed, logits)
