"""Which tokens a draw may take: min_p, top_k and top_p without sorting the vocabulary.

Every function takes weights (unnormalized probabilities, [num_ids] float32) and the ids that are
still allowed (ascending; None is all), and gives the ids it keeps, ascending.
"""

import numpy as np

_SMALL = 64
"""Below so many ids a sort is cheaper than another partition."""
_FIRST_CUT = 1e-3
"""Ids with less than this part of the largest weight are rarely needed: looked at last."""


def keep_min_p(weights: np.ndarray, min_p: float, ids: np.ndarray | None = None) -> np.ndarray:
    """Ids with at least `min_p` times the largest weight."""
    values = weights if ids is None else weights[ids]
    kept = np.flatnonzero(values >= values.max() * np.float32(min_p))
    return kept if ids is None else ids[kept]


def keep_top_k(values: np.ndarray, k: int, ids: np.ndarray | None = None) -> np.ndarray:
    """Ids of the k largest values (which may also be logits); among equals any."""
    candidates = values if ids is None else values[ids]
    if k >= candidates.size:
        return np.arange(values.size) if ids is None else ids
    kept = np.argpartition(candidates, candidates.size - k)[-k:]
    kept.sort()
    return kept if ids is None else ids[kept]


def keep_top_p(weights: np.ndarray, top_p: float, ids: np.ndarray | None = None) -> np.ndarray:
    """The fewest ids, heaviest first, whose weights reach `top_p` of the sum over `ids`.

    Keeps at least one id. Halves the undecided ids by partition, so the work is linear.
    """
    rest = np.arange(weights.size) if ids is None else ids
    values = weights[rest]
    missing = top_p * float(values.sum(dtype=np.float64))
    kept: list[np.ndarray] = []
    is_heavy = values >= values.max() * np.float32(_FIRST_CUT)
    upper, lower = rest[is_heavy], rest[~is_heavy]
    while True:
        mass = float(weights[upper].sum(dtype=np.float64))
        if mass >= missing or lower.size == 0:
            rest = upper
        else:
            kept.append(upper)
            missing -= mass
            rest = lower
        if rest.size <= _SMALL:
            break
        half = rest.size // 2
        order = np.argpartition(weights[rest], half)
        upper, lower = rest[order[half:]], rest[order[:half]]
    order = np.argsort(-weights[rest], kind="stable")
    mass_before = np.cumsum(weights[rest][order], dtype=np.float64)
    count = int(np.searchsorted(mass_before, missing)) + 1
    kept.append(rest[order[:count]])
    result = np.concatenate(kept)
    result.sort()
    return result
