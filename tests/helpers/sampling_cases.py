"""Logits and filters that are hard to draw from, and what a right draw is, by the definition in
NumPy."""

import math
from collections.abc import Sequence

import numpy as np
from everycast.engine import numpy_sampling as oracle
from hypothesis import strategies as st

FILTERS = (
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300, "temperature": 0.5},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.5, "temperature": 4.0},
    {"top_p": 0.0},
    {"top_p": 0.9999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 40, "top_p": 0.8, "temperature": 1.3},
    {"temperature": 1e-5, "top_p": 0.9},
    {"temperature": 1e25, "top_k": 11},
)
ANY_LOGITS = {
    "seed": st.integers(0, 10**6),
    "spread": st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    "decimals": st.integers(0, 6),
}
"""Arguments of a property test: `random_logits(…, seed, spread=spread).round(decimals)`."""
ANY_FILTERS = {
    "temperature": st.sampled_from([0.1, 0.7, 1.0, 2.0, 50.0]),
    "min_p": st.sampled_from([0.0, 0.0, 1e-4, 0.3]),
    "top_k": st.integers(0, 1100),
    "top_p": st.floats(0, 1),
}


def setting(
    uniform: float = 0.0, *, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[float, ...]:  # fmt: skip
    """A row of `settings` of `oracle.sample_from_logits`."""
    if temperature == 0:
        return (0.0, -math.inf, 0.0, 1.0, uniform)
    offset = temperature * math.log(min_p) if min_p else -math.inf
    return (math.log2(math.e) / temperature, offset, float(top_k), top_p, uniform)


def random_logits(size: int, seed: int = 0, *, rows: int = 1, spread: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng([size, seed])
    return (rng.standard_normal((rows, size)) * spread).astype(np.float32)


def hard_rows(size: int) -> np.ndarray:
    """Rows with ties, forbidden tokens, one value for all, zeros of both signs, and extremes."""
    rng = np.random.default_rng(size)
    rows = random_logits(size, 1, rows=7)
    rows[1] = rows[1].round()
    rows[2, rng.random(size) < 0.7] = -np.inf
    rows[2, -1] = 0.5
    rows[3] = 2.25
    rows[4] = rng.choice(np.array([0.0, -0.0, -1.0], np.float32), size)
    rows[5] *= 1e6
    rows[6] = -np.inf
    rows[6, size // 2] = -3e38
    return rows


def kept_weights(row: np.ndarray, **filters: float) -> tuple[np.ndarray, np.ndarray]:
    """The ids that the filters leave, and their probabilities but for a factor."""
    *fixed, _ = setting(**filters)
    kept = oracle.kept_ids(row, *fixed)
    return kept, np.exp2((row[kept].astype(np.float64) - float(row.max())) * fixed[0])


def interval_middles(weights: np.ndarray, ends: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """(indices, uniform numbers that draw them) of the first and last `ends` weights and of each
    `step`-th between them: the middle of a weight's interval."""
    stops = np.cumsum(weights) / weights.sum()
    starts = np.append(0.0, stops[:-1])
    # An interval narrower than the rounding of float32 weights cannot be hit on purpose.
    wide = np.flatnonzero(stops - starts > 1e-5)
    some = np.unique(np.concatenate([wide[:ends], wide[ends:-ends:step], wide[-ends:]]))
    return some, ((starts + stops) / 2)[some]


def assert_drawn_at(
    row: np.ndarray, drawn: Sequence[int], uniforms: Sequence[float], **filters: float
) -> None:
    """Each token is the one whose interval holds its uniform number, but for rounding errors."""
    kept, weights = kept_weights(row, **filters)
    # Where top_p cuts in the middle of a rounding error, one id more or less is right as well.
    wider = {**filters, "top_p": min(1.0, filters["top_p"] * (1 + 1e-6) + 1e-9)}
    more, _ = kept_weights(row, **wider)
    assert set(drawn) <= set(more)
    ends = np.cumsum(weights) / weights.sum()
    for token, uniform in zip(drawn, uniforms, strict=True):
        if token in kept:
            place = int(np.searchsorted(kept, token))
            slack = 1e-5 + (len(more) - len(kept)) * weights.min() / weights.sum()
            assert (ends[place - 1] if place else 0) - slack <= uniform <= ends[place] + slack


def assert_follows_distribution(row: np.ndarray, drawn: np.ndarray, **filters: float) -> None:
    """Pearson's χ² of the draws is within four standard deviations, and no other id was drawn."""
    kept, weights = kept_weights(row, **filters)
    expected = weights / weights.sum() * len(drawn)
    observed = np.bincount(drawn, minlength=len(row))[kept]
    assert observed.sum() == len(drawn)
    freedom = len(kept) - 1
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)
