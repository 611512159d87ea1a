"""Which tokens a draw may take: min_p, top_k and top_p without sorting the vocabulary.

Every filter takes weights (unnormalized probabilities, [num_ids] float32, not negative) and the ids
that are still allowed (ascending; None is all), and gives the ids it keeps, ascending. `draw` takes
one of them.
"""

import math

import numpy as np

_SMALL = 256
"""So few ids are sorted."""
_SAMPLE_STRIDE = 64
_BLOCK = 256


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
    kept = _top_places(candidates, k)
    kept.sort()
    return kept if ids is None else ids[kept]


def keep_top_p(weights: np.ndarray, top_p: float, ids: np.ndarray | None = None) -> np.ndarray:
    """The fewest ids, heaviest first, whose weights reach `top_p` of the sum over `ids`.

    Keeps at least one id. Looks for the lightest kept weight by bisection over the weights, and
    sorts the few ids that are left undecided.
    """
    values = weights if ids is None else weights[ids]
    wanted = top_p * float(values.sum(dtype=np.float64))
    # What weighs more than `high` is kept, and is not enough; more than `low` would be enough.
    low, high = np.float32(0), values.max()
    mass_above_high = 0.0
    num_above_low, num_above_high = int(np.count_nonzero(values)), 0
    while num_above_low - num_above_high > _SMALL and np.nextafter(low, high) < high:
        # The geometric mean, since weights are spread over many orders of magnitude.
        middle = math.sqrt(float(low) * float(high)) if low > 0 else 1e-3 * float(high)
        pivot = min(max(np.float32(middle), np.nextafter(low, high)), np.nextafter(high, low))
        is_above = values > pivot
        mass = float((values * is_above).sum(dtype=np.float64))
        if mass >= wanted:
            low, num_above_low = pivot, int(np.count_nonzero(is_above))
        else:
            high, num_above_high = pivot, int(np.count_nonzero(is_above))
            mass_above_high = mass
    undecided = np.flatnonzero((values > low) & (values <= high))
    undecided = undecided[np.argsort(-values[undecided], kind="stable")]
    mass_reached = mass_above_high + np.cumsum(values[undecided], dtype=np.float64)
    count = int(np.searchsorted(mass_reached, wanted)) + 1
    is_kept = values > high
    is_kept[undecided[:count]] = True
    kept = np.flatnonzero(is_kept)
    return kept if ids is None else ids[kept]


def draw(weights: np.ndarray, uniform: float) -> int:
    """The place where the cumulative sum of `weights` passes `uniform` (in [0, 1)) of the total.

    weights: [num_weights] float32, not all zero. A place without weight is never drawn.
    """
    # Sums of blocks first: a cumulative sum of everything is thirty times slower than a sum.
    starts = np.arange(0, weights.size, _BLOCK)
    block_sums = np.add.reduceat(weights, starts, dtype=np.float64)
    block, target = _pass(np.cumsum(block_sums), uniform * float(block_sums.sum()))
    start = int(starts[block])
    inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    place, _ = _pass(inside, target)
    return start + place


def _pass(cumulative: np.ndarray, target: float) -> tuple[int, float]:
    """Where the cumulative sum exceeds `target`, and what of the target is left there."""
    place = int(np.searchsorted(cumulative, target, side="right"))
    # Rounding can put the target at the very end: the last place with weight is meant then.
    place = min(place, int(np.searchsorted(cumulative, cumulative[-1])))
    return place, target - (float(cumulative[place - 1]) if place else 0.0)


def _top_places(values: np.ndarray, k: int) -> np.ndarray:
    """Places of the k largest of more than k values, in no order."""
    # A guess from a sample leaves few to choose from; too few, and all are looked at.
    sample = np.sort(values[::_SAMPLE_STRIDE])
    rank = k // _SAMPLE_STRIDE + 4
    if rank < sample.size:
        candidates = np.flatnonzero(values >= sample[-rank])
        if k < candidates.size < values.size:
            places: np.ndarray = candidates[_top_places_of_all(values[candidates], k)]
            return places
    return _top_places_of_all(values, k)


def _top_places_of_all(values: np.ndarray, k: int) -> np.ndarray:
    places: np.ndarray = np.argpartition(values, values.size - k)[-k:]
    return places
