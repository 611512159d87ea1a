"""The definition of sampling, which the compiled functions are tested against, on its own."""

import math

import numpy as np
import pytest
from everycast.engine import numpy_sampling
from everycast.engine.numpy_sampling import kept_ids
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.integers(1, 1000)
SPREADS = st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0])
LOG2_E = math.log2(math.e)


def make_row(seed: int, size: int, spread: float) -> np.ndarray:
    """Logits with many equal ones for a small `spread`."""
    values = np.random.default_rng(seed).standard_normal(size).round(2) * spread
    row: np.ndarray = values.astype(np.float32)
    return row


def kept(row: np.ndarray, *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    return kept_ids(row, LOG2_E, math.log(min_p) if min_p else -math.inf, top_k, top_p)


@given(seed=st.integers(0, 99), size=SIZES, spread=SPREADS, top_p=st.floats(0, 1))
def test_top_p_is_the_smallest_set(seed: int, size: int, spread: float, top_p: float) -> None:
    row = make_row(seed, size, spread)
    ids = kept(row, top_p=top_p)
    values = np.exp(row.astype(np.float64) - row.max())
    missing, slack = top_p * values.sum(), 1e-9 * values.sum()
    assert np.all(np.diff(ids) > 0)
    assert values[ids].sum() >= missing - slack
    assert len(ids) == 1 or values[ids].sum() - values[ids].min() < missing + slack
    dropped = np.delete(np.arange(size), ids)
    assert dropped.size == 0 or row[dropped].max() <= row[ids].min()


@given(seed=st.integers(0, 99), size=SIZES, spread=SPREADS, k=st.integers(1, 300))
def test_top_k_keeps_the_largest_and_of_equals_the_lowest_ids(
    seed: int, size: int, spread: float, k: int
) -> None:
    row = make_row(seed, size, spread)
    by_value_then_id = sorted(range(size), key=lambda i: (-row[i], i))
    assert kept(row, top_k=k).tolist() == sorted(by_value_then_id[:k])


def test_filters_work_on_what_others_left() -> None:
    row = np.log(np.array([1, 8, 4, 2, 1], dtype=np.float32))
    assert kept(row, min_p=0.24).tolist() == [1, 2, 3]
    assert kept(row, top_k=2).tolist() == [1, 2]
    assert kept(row, top_k=4).tolist() == [0, 1, 2, 3]
    assert kept(row, top_p=0.5).tolist() == [1]
    assert kept(row, top_p=0.51).tolist() == [1, 2]
    # Of min_p's 14, not of all 16: 8 is more than 0.55 of it.
    assert kept(row, min_p=0.24, top_p=0.55).tolist() == [1]
    assert kept(row, top_k=2, top_p=0.7).tolist() == [1, 2]


@given(
    seed=st.integers(0, 99),
    size=SIZES,
    spread=SPREADS,
    uniform=st.floats(0, 1, exclude_max=True) | st.just(np.nextafter(1, 0)),
)
def test_draw_inverts_the_cumulative_probability(
    seed: int, size: int, spread: float, uniform: float
) -> None:
    row = make_row(seed, size, spread)
    row[np.random.default_rng(seed).random(size) < 0.3] = -np.inf
    row[0] = 0.0
    settings = np.array([[LOG2_E, -math.inf, 0, 1, uniform]])
    (place,) = numpy_sampling.sample_from_logits(row[None], np.array([0]), settings, size)
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    cumulative = np.cumsum(weights)
    slack = 1e-9 * cumulative[-1]
    assert weights[place] > 0
    target = uniform * cumulative[-1]
    assert cumulative[place] - weights[place] - slack <= target <= cumulative[place] + slack


def test_bitmask_bits_count_from_the_lowest() -> None:
    logits = np.zeros((2, 40), np.float32)
    mask = np.array([[1 | 1 << 31 | 1 << 5, 1 << 7]], np.int64).astype(np.uint32).view(np.int32)
    numpy_sampling.apply_bitmask_inplace(logits, np.array([1]), mask)
    assert np.isfinite(logits[0]).all()
    assert np.flatnonzero(np.isfinite(logits[1])).tolist() == [0, 5, 31, 39]


def test_penalties_follow_their_definitions() -> None:
    logits = np.array([[4.0, -4.0, 1.0, 0.0]], np.float32)
    numpy_sampling.apply_penalty_inplace(
        logits, np.array([0]), np.array([0, 0, 0]), np.array([0, 1, 3]), np.array([0, 2, 1]),
        np.array([[0.5, 0.25, 2.0]], np.float32),
    )  # fmt: skip
    assert logits[0].tolist() == pytest.approx([2.0, -9.0, 1.0, -0.75])
