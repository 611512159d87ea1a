"""The tokens that a draw may take: gathered from a row, cut to top_k and top_p, one of them drawn.

Nothing is sorted. A threshold is found by bisection over the bits of float32, whose order is that
of the numbers: at most 32 passes over the candidates. Candidates keep the order of their ids, so
that of equal logits the lowest ids are kept.
"""

import math
from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .sampling_rows import BLOCK, LaneSum, Plane, Row, local_values, store, when
from .vectors import LANES, constant, ramp, splat

DRAW_CHUNK = 256
"""Weights whose sum is looked at together while drawing; capacities are multiples of it."""


class Candidates:
    """Emits the work on one row's candidates, of which there are `count`.

    Their logits, weights and ids (as the bits of float32) are in three planes of scratch memory,
    with -inf and 0 after them up to a multiple of `DRAW_CHUNK`.
    """

    def __init__(
        self, row: Row, inverse_temperature: Any, logits: Plane, weights: Plane, ids: Plane
    ) -> None:
        self._row, self._inverse_temperature = row, inverse_temperature
        self._logits, self._weights, self._ids = logits, weights, ids
        self._count = local_values(1, "int64", T.int64(0))

    @property
    def count(self) -> Any:
        return self._count[0]

    def id_at(self, place: Any) -> Any:
        return T.reinterpret("int32", self._ids[place])

    def gather(self, lowest: Any) -> None:
        """The ids with at least the logit `lowest`."""
        row = self._row
        with B.serial(row.num_blocks) as block:
            with when(row.maxima[block] >= lowest):
                start = B.Bind(block * BLOCK)
                with B.serial(B.Bind(T.min(T.int64(BLOCK), row.num_ids - start))) as i:
                    place = B.Bind(self.count)
                    logit = B.Bind(row.logits[row.row, start + i])
                    self._logits.put(logit, place)
                    self._ids.put(T.reinterpret("float32", T.Cast("int32", start + i)), place)
                    store(self._count, place + T.Cast("int64", logit >= lowest))
        self._pad(self._logits, -math.inf)

    def weigh(self) -> None:
        with B.serial(self._num_chunks() * (DRAW_CHUNK // LANES)) as i:
            logit = B.Bind(self._logits[ramp(i * LANES)])
            weight = self._row.weigh(logit, self._inverse_temperature)
            self._weights.put(weight, ramp(i * LANES))

    def weigh_whole_row(self) -> None:
        """Make every id of the row a candidate: its place is the id; only weights are there."""

        def emit(block: Any, vectors: Any) -> None:
            for j, vector in enumerate(vectors):
                weight = self._row.weigh(vector, self._inverse_temperature)
                self._weights.put(weight, ramp(block * BLOCK + j * LANES))

        self._row.for_blocks(emit)
        store(self._count, self._row.num_ids)
        self._pad(self._weights, 0.0)

    def total_weight(self) -> Any:
        return self._mass(lambda logit: logit >= splat(T.float32(-math.inf)))

    def keep_top_k(self, top_k: Any, lowest: Any) -> None:
        """Cut to the `top_k` highest, which are fewer; all are at least `lowest`."""

        def count_of(keep: Callable[[Any], Any]) -> Any:
            return count_lanes(self._logits, self._num_vectors(), keep)

        threshold = highest_threshold(
            lowest, self._row.highest, lambda t: count_of(lambda logit: logit >= splat(t)) >= top_k
        )
        num_above = count_of(lambda logit: logit > splat(threshold))
        self._keep(threshold, B.Bind(top_k - num_above))
        self._pad(self._logits, -math.inf)

    def keep_top_p(self, wanted: Any, lowest: Any) -> None:
        """Cut to the fewest, highest first, whose weights reach `wanted`; at least one."""
        threshold = highest_threshold(
            lowest,
            self._row.highest,
            lambda t: self._mass(lambda logit: logit >= splat(t)) >= wanted,
        )
        missing = B.Bind(wanted - self._mass(lambda logit: logit > splat(threshold)))
        # All logits at the threshold have this weight. It is 0 only if rounding hid that the
        # others are enough.
        vector = local_values(LANES, "float32")
        store(vector, self._row.weigh(splat(threshold), self._inverse_temperature), ramp(0))
        weight = B.Bind(T.max(T.Cast("float64", vector[0]), T.float64(1e-300)))
        most = T.Cast("float64", self.count)
        num_equal = T.max(T.min(T.ceil(missing / weight), most), T.float64(1))
        self._keep(threshold, B.Bind(T.Cast("int64", num_equal)))
        self._pad(self._weights, 0.0)

    def draw(self, uniform: Any) -> Any:
        """The place where the cumulative weight passes `uniform` of the total; its weight is not
        0. Chunks are summed in the same way twice, so that the search ends."""
        num_chunks = B.Bind(self._num_chunks())
        total = local_values(1, "float64", T.float64(0))
        with B.serial(num_chunks) as chunk:
            store(total, total[0] + self._chunk_sum(chunk))
        # Below the total, whatever rounding does.
        below = T.reinterpret("float64", T.reinterpret("int64", total[0]) - T.int64(1))
        target = B.Bind(T.min(uniform * total[0], below))
        reached = local_values(1, "float64", T.float64(0))
        place = local_values(1, "int64", T.int64(-1))
        state = local_values(1, "int64", T.int64(0))
        with B.While(place[0] < 0):
            chunk = B.Bind(state[0])
            after = B.Bind(reached[0] + self._chunk_sum(chunk))
            with when(after > target):
                self._draw_from(chunk, target, reached, place)
            store(reached, after)
            store(state, chunk + 1)
        return B.Bind(place[0])

    def _draw_from(self, chunk: Any, target: Any, reached: Any, place: Any) -> None:
        """Set `place` in the chunk where `reached` passes `target`: the last with weight if
        rounding denies it."""
        with B.serial(DRAW_CHUNK) as i:
            at = B.Bind(chunk * DRAW_CHUNK + i)
            weight = B.Bind(self._weights[at])
            with when(T.And(reached[0] <= target, weight > T.float32(0))):
                store(place, at)
                store(reached, reached[0] + T.Cast("float64", weight))

    def _chunk_sum(self, chunk: Any) -> Any:
        total = LaneSum("float64")
        with B.serial(DRAW_CHUNK // LANES) as i:
            total.add(self._weights[ramp(chunk * DRAW_CHUNK + i * LANES)])
        return total.total()

    def _mass(self, keep: Callable[[Any], Any]) -> Any:
        """Sum of the weights of the candidates whose logits `keep` takes."""
        total = LaneSum("float64")
        with B.serial(self._num_vectors()) as i:
            kept = keep(B.Bind(self._logits[ramp(i * LANES)]))
            weight = T.Select(kept, self._weights[ramp(i * LANES)], constant(0.0))
            total.add(B.Bind(weight))
        return total.total()

    def _keep(self, threshold: Any, num_equal: Any) -> None:
        """Keep the candidates above `threshold` and the first `num_equal` of those at it."""
        kept = local_values(2, "int64", T.int64(0), num_equal)
        with B.serial(B.Bind(self.count)) as i:
            logit = B.Bind(self._logits[i])
            is_equal = B.Bind(T.Cast("int64", T.And(logit == threshold, kept[1] > 0)))
            place = B.Bind(kept[0])
            for plane in (self._logits, self._weights, self._ids):
                plane.put(plane[i], place)
            store(kept, kept[1] - is_equal, 1)
            store(kept, place + T.max(is_equal, T.Cast("int64", logit > threshold)))
        store(self._count, kept[0])

    def _pad(self, plane: Plane, value: float) -> None:
        start = B.Bind(self.count)
        with B.serial(B.Bind(self._num_chunks() * DRAW_CHUNK - start)) as i:
            plane.put(T.float32(value), start + i)

    def _num_chunks(self) -> Any:
        return B.Bind((self.count + (DRAW_CHUNK - 1)) // DRAW_CHUNK)

    def _num_vectors(self) -> Any:
        return B.Bind((self.count + (LANES - 1)) // LANES)


def count_lanes(plane: Plane, num_vectors: Any, keep: Callable[[Any], Any]) -> Any:
    """How many values of the first vectors of `plane` are such that `keep` takes them, int64."""
    total = LaneSum("int32")
    with B.serial(num_vectors) as i:
        total.add(keep(B.Bind(plane[ramp(i * LANES)])))
    return B.Bind(T.Cast("int64", total.total()))


def highest_threshold(lowest: Any, highest: Any, is_enough: Callable[[Any], Any]) -> Any:
    """The highest float32 t in [lowest, highest] with `is_enough(t)`.

    `is_enough` holds for `lowest` (and is not asked there), and for less than what it holds for.
    """
    bounds = local_values(2, "int64", _order_of(lowest), _order_of(highest) + 1)
    with B.While(bounds[1] - bounds[0] > 1):
        middle = B.Bind((bounds[0] + bounds[1]) >> T.int64(1))
        is_reached = B.Bind(is_enough(_float_at(middle)))
        low, high = B.Bind(bounds[0]), B.Bind(bounds[1])
        store(bounds, T.Select(is_reached, middle, low), 0)
        store(bounds, T.Select(is_reached, high, middle), 1)
    return _float_at(B.Bind(bounds[0]))


def _order_of(value: Any) -> Any:
    """The place of a float32 in the order of all of them, int64."""
    bits = B.Bind(T.reinterpret("int32", value))
    return B.Bind(T.Cast("int64", T.Select(bits < 0, bits ^ T.int32(0x7FFFFFFF), bits)))


def _float_at(order: Any) -> Any:
    place = B.Bind(T.Cast("int32", order))
    bits = T.Select(place < 0, place ^ T.int32(0x7FFFFFFF), place)
    return B.Bind(T.reinterpret("float32", bits))
