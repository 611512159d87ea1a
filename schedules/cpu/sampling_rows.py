"""What sampling reads of a row of logits: its highest value, in blocks, and weights.

A row is cut into blocks of `BLOCK` ids. Their maxima say where high logits are, so that later
steps look at few blocks; and they find the arg max. Only the first `num_ids` ids count: a
vocabulary may be padded.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .vectors import LANES, constant, exp2, ramp, splat

BLOCK = 64
_VECTORS = BLOCK // LANES
INFINITY_BITS = 0x7F800000


def num_blocks(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK)


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def local_values(size: int, dtype: str, *values: Any) -> Any:
    """`size` values of a thread's own, on the stack; the first ones set to `values`."""
    array = B.alloc_buffer((size,), dtype, annotations={"disable_lower_builtin": True})
    for i, value in enumerate(values):
        B.buffer_store(array, value, [i])
    return array


def store(array: Any, value: Any, at: Any = 0) -> None:
    B.buffer_store(array, value, [at])


@contextmanager
def when(condition: Any) -> Iterator[None]:
    """`with when(c):` emit what happens only then.

    The condition is bound to a variable: else TVM's passes solve it for bounds of every access
    inside, which doubles the time to compile.
    """
    with B.If(B.Bind(condition)), B.Then():
        yield


def for_tasks(num_items: Any, num_tasks: Any, emit: Callable[[Any, Any], None]) -> None:
    """`emit(task, item)` for every item: tasks in parallel, the items of one after the other.

    One item wakes the threads too: code for it alone would double the time to compile.
    """
    num_tasks = B.Bind(T.min(num_tasks, num_items))
    with B.parallel(num_tasks) as task:
        with B.serial(B.Bind((num_items - task + num_tasks - 1) // num_tasks)) as i:
            emit(task, B.Bind(task + i * num_tasks))


def reduce_lanes(vector: Any, dtype: str, combine: Callable[[Any, Any], Any]) -> Any:
    """One value of the 16 lanes, pairwise: the same order on every machine."""
    scratch = local_values(LANES, dtype)
    store(scratch, vector, ramp(0))
    width = LANES
    while width > 1:
        width //= 2
        low, high = scratch[ramp(0, width)], scratch[ramp(width, width)]
        store(scratch, combine(low, high), ramp(0, width))
    return B.Bind(scratch[0])


class Plane:
    """`workspace[task, index]`, a task's own scratch memory, as a vector of float32."""

    def __init__(self, workspace: Any, task: Any, index: int) -> None:
        self._workspace, self._task, self._index = workspace, task, index

    def __getitem__(self, at: Any) -> Any:
        return self._workspace[self._task, self._index, at]

    def put(self, value: Any, at: Any) -> None:
        B.buffer_store(self._workspace, value, [self._task, self._index, at])


class Row:
    """Emits what is read of `logits[row, :num_ids]`; `maxima` is scratch memory."""

    def __init__(self, logits: Any, row: Any, num_ids: Any, maxima: Plane) -> None:
        self.logits, self.row, self.num_ids, self.maxima = logits, row, num_ids, maxima
        self.num_full = B.Bind(num_ids // BLOCK)
        self.num_rest = B.Bind(num_ids % BLOCK)
        self.num_blocks = B.Bind((num_ids + (BLOCK - 1)) // BLOCK)
        self._tail = local_values(BLOCK, "float32")
        for j in range(_VECTORS):
            store(self._tail, constant(-math.inf), ramp(j * LANES))
        with B.serial(self.num_rest) as i:
            store(self._tail, logits[row, self.num_full * BLOCK + i], i)

    def for_blocks(self, emit: Callable[[Any, Sequence[Any]], None]) -> None:
        """`emit(block, vectors)` for each block; past `num_ids` there is -inf."""
        with B.serial(self.num_full) as block:
            start = B.Bind(block * BLOCK)
            emit(block, [
                B.Bind(self.logits[self.row, ramp(start + j * LANES)]) for j in range(_VECTORS)
            ])  # fmt: skip
        with when(self.num_rest > 0):
            emit(self.num_full, [B.Bind(self._tail[ramp(j * LANES)]) for j in range(_VECTORS)])

    def find_highest(self) -> None:
        """Fill `maxima` (then -inf up to 16), and set `highest` and `is_number`: no logit is NaN
        and the highest is finite."""
        magnitudes = local_values(LANES, "int32")
        store(magnitudes, splat(T.int32(0)), ramp(0))

        def emit(block: Any, vectors: Sequence[Any]) -> None:
            for vector in vectors:
                bits = T.reinterpret("int32x16", vector) & splat(T.int32(0x7FFFFFFF))
                store(magnitudes, T.max(magnitudes[ramp(0)], bits), ramp(0))
            a, b, c, d = vectors
            largest = B.Bind(T.max(T.max(a, b), T.max(c, d)))
            self.maxima.put(highest_lane(largest), block)

        self.for_blocks(emit)
        num_vectors = B.Bind((self.num_blocks + (LANES - 1)) // LANES)
        with B.serial(num_vectors * LANES - self.num_blocks) as i:
            self.maxima.put(T.float32(-math.inf), self.num_blocks + i)
        highest = local_values(LANES, "float32")
        store(highest, constant(-math.inf), ramp(0))
        with B.serial(num_vectors) as i:
            maxima = self.maxima[ramp(i * LANES)]
            store(highest, T.max(highest[ramp(0)], maxima), ramp(0))
        self.highest = reduce_lanes(highest[ramp(0)], "float32", T.max)
        magnitude = reduce_lanes(magnitudes[ramp(0)], "int32", T.max)
        highest_bits = B.Bind(T.reinterpret("int32", self.highest) & T.int32(0x7FFFFFFF))
        self.is_number = B.Bind(
            T.And(magnitude <= T.int32(INFINITY_BITS), highest_bits < T.int32(INFINITY_BITS))
        )

    def arg_max(self) -> Any:
        """The lowest id with the highest logit; only for a row that is numbers."""
        place = local_values(1, "int64", T.int64(0))
        with B.While(self.maxima[place[0]] < self.highest):
            store(place, place[0] + 1)
        store(place, place[0] * BLOCK)
        with B.While(self.logits[self.row, place[0]] < self.highest):
            store(place, place[0] + 1)
        return B.Bind(place[0])

    def weigh(self, logit: Any, inverse_temperature: Any) -> Any:
        """2^((logit - highest) · inverse_temperature) of a vector: 1 for the highest."""
        return exp2((logit - splat(self.highest)) * splat(inverse_temperature))


def highest_lane(vector: Any) -> Any:
    """By integers, whose maximum LLVM finds pairwise: that of floats is a chain of 16."""
    bits = B.Bind(T.reinterpret("int32x16", vector))
    order = B.Bind(bits ^ ((bits >> splat(T.int32(31))) & splat(T.int32(0x7FFFFFFF))))
    name = "llvm.vector.reduce.smax"
    highest = B.Bind(T.call_llvm_pure_intrin("int32", name, order))
    bits = highest ^ ((highest >> T.int32(31)) & T.int32(0x7FFFFFFF))
    return B.Bind(T.reinterpret("float32", bits))


class LaneSum:
    """Sums vectors lane by lane: float32 in float64, or truths, counted in int32."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._lanes = local_values(LANES, dtype)
        store(self._lanes, T.Cast(f"{dtype}x{LANES}", splat(T.int32(0))), ramp(0))

    def add(self, vector: Any) -> None:
        wide = T.Cast(f"{self._dtype}x{LANES}", vector)
        store(self._lanes, self._lanes[ramp(0)] + wide, ramp(0))

    def total(self) -> Any:
        return reduce_lanes(self._lanes[ramp(0)], self._dtype, lambda a, b: a + b)
