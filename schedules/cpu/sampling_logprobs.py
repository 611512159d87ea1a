"""What log probabilities are made of: the sum of exponentials of a row, and its highest logits."""

import functools
import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import either
from .kernel import body, kernel
from .sampling_draw import workspace_shape
from .sampling_rows import BLOCK, LaneSum, Plane, Row, for_tasks, local_values, store, when

MAX_TOP = 20
_LOG2_E = math.log2(math.e)


@functools.cache
def token_logprobs(vocab_size: int) -> tirx.PrimFunc:
    """The parts of log probabilities: those of token t are `logit(t) - highest - ln(sum)`.

    logits [num_rows, vocab_size] float32, of which the first num_ids (int64) ids count;
    rows [n] and token_ids [n] int32, a row and the token in question;
    workspace as in `sample_from_logits`;
    parts [n, 3] float64: highest logit, Σ exp(logit - highest), logit of the token, all NaN if the
      logits are not numbers;
    top_ids [n, num_top] int32 and top_logits float32, num_top ≤ 20: the most likely ids, highest
      first, and of equals the lowest id; -1 where there are not so many.
    """
    with kernel("token_logprobs") as (k, ib):
        logits = k.buffer("logits", ("num_rows", vocab_size), "float32")
        rows = k.buffer("rows", ("num_tokens",), "int32")
        token_ids = k.buffer("token_ids", ("num_tokens",), "int32")
        num_ids = k.scalar("num_ids")
        workspace = k.buffer("workspace", ("num_tasks", *workspace_shape(vocab_size)), "float32")
        parts = k.buffer("parts", ("num_tokens", 3), "float64")
        top_ids = k.buffer("top_ids", ("num_tokens", "num_top"), "int32")
        top_logits = k.buffer("top_logits", ("num_tokens", "num_top"), "float32")
        num_top = k.size("num_top")

        def emit(task: Any, token: Any) -> None:
            row = Row(logits, B.Bind(rows[token]), num_ids, Plane(workspace, task, 0))
            row.find_highest()
            top = _Top(num_top)
            with either(row.is_number) as (number, other):
                with number:
                    values = (row.highest, _sum(row), logits[row.row, token_ids[token]])
                    _store_parts(parts, token, values)
                    with when(num_top > 0):
                        top.find(row)
                with other:
                    _store_parts(parts, token, (T.float64(math.nan),) * 3)
            with B.serial(num_top) as i:
                B.buffer_store(top_ids, top.ids[i + 1], [token, i])
                B.buffer_store(top_logits, top.logits[i + 1], [token, i])

        with body():
            for_tasks(k.size("num_tokens"), k.size("num_tasks"), emit)
    return ib.get()


def _store_parts(parts: Any, token: Any, values: tuple[Any, ...]) -> None:
    for i, value in enumerate(values):
        B.buffer_store(parts, T.Cast("float64", value), [token, i])


def _sum(row: Row) -> Any:
    total = LaneSum("float64")

    def emit(block: Any, vectors: Any) -> None:
        for vector in vectors:
            total.add(row.weigh(vector, T.float32(_LOG2_E)))

    row.for_blocks(emit)
    return total.total()


class _Top:
    """The highest logits so far, in order, from place 1 on; +inf at place 0 ends every search."""

    def __init__(self, num_top: Any) -> None:
        self._num_top = num_top
        self.logits = local_values(MAX_TOP + 1, "float32", T.float32(math.inf))
        self.ids = local_values(MAX_TOP + 1, "int32")
        with B.serial(MAX_TOP) as i:
            store(self.logits, T.float32(-math.inf), i + 1)
            store(self.ids, T.int32(-1), i + 1)
        self._filled = local_values(1, "int64", T.int64(0))

    def find(self, row: Row) -> None:
        with B.serial(row.num_blocks) as block:
            with when(self._enters(row.maxima[block])):
                start = B.Bind(block * BLOCK)
                with B.serial(B.Bind(T.min(T.int64(BLOCK), row.num_ids - start))) as i:
                    logit = B.Bind(row.logits[row.row, start + i])
                    with when(self._enters(logit)):
                        self._insert(logit, T.Cast("int32", start + i))

    def _enters(self, logit: Any) -> Any:
        is_higher = logit > self.logits[self._num_top]
        return B.Bind(T.Or(self._filled[0] < self._num_top, is_higher))

    def _insert(self, logit: Any, token_id: Any) -> None:
        """Put it behind all that are as high, whose ids are lower; the last falls out."""
        place = local_values(1, "int64", T.min(self._filled[0] + 1, self._num_top))
        with B.While(self.logits[place[0] - 1] < logit):
            above = B.Bind(place[0] - 1)
            store(self.logits, self.logits[above], above + 1)
            store(self.ids, self.ids[above], above + 1)
            store(place, above)
        store(self.logits, logit, place[0])
        store(self.ids, token_id, place[0])
        store(self._filled, T.min(self._filled[0] + 1, self._num_top))
