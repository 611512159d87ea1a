"""One token for each draw from a row of logits: arg max, or temperature, min_p, top_k, top_p.

Bounds come first. Whatever is below min_p, below the k-th highest maximum of a block, or in a tail
too light for top_p, is never gathered, and a usual row has some hundred candidates left.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import either
from .kernel import body, kernel
from .sampling_candidates import DRAW_CHUNK, Candidates, count_lanes, highest_threshold
from .sampling_rows import LaneSum, Plane, Row, for_tasks, local_values, padded, store, when
from .vectors import LANES, constant, splat

NUM_SETTINGS = 5
NUM_PLANES = 4
_MAXIMA, _LOGITS, _WEIGHTS, _IDS = range(NUM_PLANES)


def workspace_shape(vocab_size: int) -> tuple[int, int]:
    """Shape of a task's scratch memory, float32."""
    return (NUM_PLANES, padded(vocab_size, DRAW_CHUNK))


@functools.cache
def sample_from_logits(vocab_size: int) -> tirx.PrimFunc:
    """One token id for each draw; -1 where the logits are not numbers (NaN, or highest infinite).

    logits [num_rows, vocab_size] float32, of which the first num_ids (int64) ids count;
    rows [n] int32, the row of each draw;
    settings [n, 5] float64, each:
      inverse_temperature  log2(e) / temperature; 0 takes the arg max (the lowest id of equals)
      min_p_offset         temperature · ln(min_p): keep logits of at least the highest plus this
      top_k                keep so many of these, the highest; 0 keeps all
      top_p                keep the fewest of these, highest first, that have this part of their
                           probability; at least one
      uniform              in [0, 1): the token where the cumulative probability passes it
    workspace [num_tasks, *workspace_shape] float32, scratch memory: a task for each thread;
    token_ids [n] int32, the result.

    Of equal logits the lowest ids are kept. A draw depends on its row and settings alone.
    """
    with kernel("sample_from_logits") as (k, ib):
        logits = k.buffer("logits", ("num_rows", vocab_size), "float32")
        rows = k.buffer("rows", ("num_draws",), "int32")
        settings = k.buffer("settings", ("num_draws", NUM_SETTINGS), "float64")
        num_ids = k.scalar("num_ids")
        workspace = k.buffer("workspace", ("num_tasks", *workspace_shape(vocab_size)), "float32")
        token_ids = k.buffer("token_ids", ("num_draws",), "int32")

        def emit(task: Any, draw: Any) -> None:
            planes = [Plane(workspace, task, i) for i in range(NUM_PLANES)]
            row = Row(logits, B.Bind(rows[draw]), num_ids, planes[_MAXIMA])
            values = [settings[draw, i] for i in range(NUM_SETTINGS)]
            B.buffer_store(token_ids, _Draw(row, planes, values).emit(), [draw])

        with body():
            for_tasks(k.size("num_draws"), k.size("num_tasks"), emit)
    return ib.get()


class _Draw:
    def __init__(self, row: Row, planes: Sequence[Plane], settings: Sequence[Any]) -> None:
        inverse, offset, top_k, top_p, uniform = settings
        self.row, self.planes = row, planes
        self.inverse = B.Bind(T.Cast("float32", inverse))
        self.offset = B.Bind(T.Cast("float32", offset))
        top_k = B.Bind(T.Cast("int64", top_k))
        limit = T.Select(top_k > 0, T.min(top_k, row.num_ids), row.num_ids)
        self.limit = B.Bind(limit)
        self.has_top_k = B.Bind(self.limit < row.num_ids)
        self.top_p, self.uniform = B.Bind(top_p), B.Bind(uniform)
        self.has_top_p = B.Bind(self.top_p < T.float64(1))

    def emit(self) -> Any:
        """The drawn token id, int32."""
        token_id = local_values(1, "int32", T.int32(-1))
        row = self.row
        row.find_highest()
        with when(row.is_number):
            with either(B.Bind(self.inverse == T.float32(0))) as (greedy, random):
                with greedy:
                    store(token_id, T.Cast("int32", row.arg_max()))
                with random:
                    self._emit_random(token_id)
        return token_id[0]

    def _emit_random(self, token_id: Any) -> None:
        candidates = Candidates(
            self.row, self.inverse,
            self.planes[_LOGITS], self.planes[_WEIGHTS], self.planes[_IDS],
        )  # fmt: skip
        has_min_p = self.offset > T.float32(-math.inf)
        is_filtered = B.Bind(T.Or(T.Or(self.has_top_k, self.has_top_p), has_min_p))
        with either(is_filtered) as (filtered, whole):
            with filtered:
                self._filter(candidates)
                store(token_id, candidates.id_at(candidates.draw(self.uniform)))
            with whole:
                candidates.weigh_whole_row()
                store(token_id, T.Cast("int32", candidates.draw(self.uniform)))

    def _filter(self, candidates: Candidates) -> None:
        lowest = local_values(1, "float32", self.row.highest + self.offset)
        total = local_values(1, "float64", T.float64(1))
        with when(T.And(self.has_top_k, self.limit <= self.row.num_blocks)):
            store(lowest, T.max(lowest[0], self._bound_of_top_k()))
        with when(self.has_top_p):
            with when(T.Not(self.has_top_k)):
                store(total, self._weight_from(B.Bind(lowest[0])))
            store(lowest, T.max(lowest[0], self._bound_of_top_p(total[0])))
        bound = B.Bind(lowest[0])
        candidates.gather(bound)
        with when(self.limit < candidates.count):
            candidates.keep_top_k(self.limit, bound)
        candidates.weigh()
        with when(self.has_top_p):
            with when(self.has_top_k):
                store(total, candidates.total_weight())
            candidates.keep_top_p(B.Bind(self.top_p * total[0]), bound)

    def _bound_of_top_k(self) -> Any:
        """So many blocks have a logit at least this high: the k highest are not below it."""
        maxima = self.row.maxima
        num_vectors = B.Bind((self.row.num_blocks + (LANES - 1)) // LANES)
        return highest_threshold(
            T.float32(-math.inf),
            self.row.highest,
            lambda t: count_lanes(maxima, num_vectors, lambda x: x >= splat(t)) >= self.limit,
        )

    def _bound_of_top_p(self, total: Any) -> Any:
        """All the kept logits below this together weigh less than half of what top_p drops.

        `total`: weight of what is kept before, or less (the highest alone weighs 1).
        """
        limit = T.Cast("float64", self.limit)
        weight = B.Bind((T.float64(1) - self.top_p) * total / limit)
        # log2, rounded down to a whole number by taking the exponent, and one less.
        exponent = (T.reinterpret("int64", weight) >> T.int64(52)) - T.int64(1024)
        return B.Bind(self.row.highest + T.Cast("float32", exponent) / self.inverse)

    def _weight_from(self, lowest: Any) -> Any:
        """Weight of all logits that are at least `lowest`."""
        total = LaneSum("float64")

        def emit(block: Any, vectors: Sequence[Any]) -> None:
            for vector in vectors:
                weight = self.row.weigh(vector, self.inverse)
                total.add(B.Bind(T.Select(vector >= splat(lowest), weight, constant(0.0))))

        self.row.for_blocks(emit)
        return total.total()
