"""A token drawn from the most probable ones that together have probability top_p.

No sort: the least probability that is still in is found digit by digit, as in a radix search over
the bits of the floats (which order positive floats as they order integers). A block of threads for
each sample:

    10 passes over the row: sums of the probabilities whose next three bits are at least 0, …, 7
    one more: what each thread's stretch of the row has above the threshold, and how often the
    threshold itself; then the draw falls into one stretch, and its thread walks along it
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from ..gpu.kernel import (
    barrier,
    bind,
    body,
    either,
    elements,
    floor_mod,
    kernel,
    kernel_factory,
    launch,
    registers,
    share,
    shared,
    store,
    when,
)
from ..gpu.limits import GpuLimits
from ..gpu.reduce import sum_lanes
from .block_size import row_threads

_DIGIT, _PASSES = 3, 10
"""Bits of a pass; 30 bits hold every probability up to 1."""
_DIGITS = 1 << _DIGIT


@kernel_factory
def token_ids(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """(probs [b, V]) → ids [b, V] int32: 0, 1, … in every row."""
    with kernel(f"token_ids_{vocab_size}") as (k, ib):
        k.buffer("probs", ("batch", vocab_size), "float32")
        ids = k.buffer("ids", ("batch", vocab_size), "int32")
        threads = min(limits.max_threads, 256)
        with body(), elements(k.size("batch") * vocab_size, threads) as at:
            token = bind(floor_mod(at, vocab_size))
            store(ids, token, T.truncdiv(at, vocab_size), token)
    return ib.get()


@kernel_factory
def sample_with_top_p(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """(probs [b, V] float32, ids [b, V] int32, uniform [n] in [0, 1), rows [n] int32, top_p [b]) →
    [n] int32: for each sample a token of its row.

    The tokens that are in: in order of falling probability (equals: of their places in the row)
    each before which less than top_p has been collected. Rows need not be sorted.
    """
    threads = row_threads(limits)
    with kernel(f"sample_top_p_{vocab_size}") as (k, ib):
        probs = k.buffer("probs", ("batch", vocab_size), "float32")
        ids = k.buffer("ids", ("batch", vocab_size), "int32")
        uniform = k.buffer("uniform", ("num_samples",), "float32")
        rows = k.buffer("rows", ("num_samples",), "int32")
        top_p = k.buffer("top_p", ("batch",), "float32")
        out = k.buffer("tokens", ("num_samples",), "int32")
        with body(), launch([k.size("num_samples")], [threads]) as ((sample,), (thread,)):
            row = bind(rows[sample])
            draw = _Draw(probs, row, vocab_size, thread, threads)
            draw.find_threshold(top_p[row])
            draw.pick(uniform[sample], top_p[row])
            with when(thread == draw.owner):
                store(out, ids[row, draw.walk()], sample)
    return ib.get()


class _Draw:
    """Emits the steps of a block of threads."""

    def __init__(self, probs: Any, row: Any, size: int, thread: Any, threads: int) -> None:
        self.probs, self.row, self.size = probs, row, size
        self.thread, self.threads = thread, threads
        self.stretch = -(-size // threads)
        self.above = registers(1)
        """Probability above the threshold."""
        self.partial = shared(_DIGITS * threads)
        self.found = shared(3)
        """Whose stretch has the token; what of it to walk past; 1 if in threshold's equals."""
        self.threshold: Any = None

    def find_threshold(self, target: Any) -> None:
        """The largest probability such that it and all above sum up to `target`; 0 if there is
        none."""
        above, partial, threads = self.above, self.partial, self.threads
        prefix = B.alloc_buffer((1,), "uint32", scope="local")
        sums = registers(_DIGITS)
        store(above, T.float32(0), 0)
        store(prefix, T.uint32(0), 0)
        starts = [digit * threads for digit in range(_DIGITS)]
        with B.serial(_PASSES) as turn:
            shift = bind(T.Cast("uint32", (_PASSES - 1 - turn) * _DIGIT))
            for digit in range(_DIGITS):
                store(sums, T.float32(0), digit)
            with share(T.int32(self.size), self.thread, threads) as i:
                value = bind(self.probs[self.row, i])
                key = bind(T.shift_right(T.reinterpret("uint32", value), shift))
                with when(T.shift_right(key, T.uint32(_DIGIT)) == prefix[0]):
                    own = bind(T.bitwise_and(key, T.uint32(_DIGITS - 1)))
                    for digit in range(_DIGITS):
                        counted = T.Select(own >= T.uint32(digit), value, T.float32(0))
                        store(sums, sums[digit] + counted, digit)
            for digit, start in enumerate(starts):
                store(partial, sums[digit], start + self.thread)
            sum_lanes(partial, starts, self.thread, threads)
            totals = [bind(partial[start]) for start in starts]
            barrier()
            best, added = T.uint32(0), totals[1]
            for digit in range(1, _DIGITS):
                is_enough = bind(above[0] + totals[digit] >= target)
                beyond = totals[digit + 1] if digit + 1 < _DIGITS else T.float32(0)
                best = bind(T.Select(is_enough, T.uint32(digit), best))
                added = bind(T.Select(is_enough, beyond, added))
            store(above, above[0] + added, 0)
            store(prefix, prefix[0] * T.uint32(_DIGITS) + best, 0)
        self.threshold = bind(T.reinterpret("float32", prefix[0]))

    def pick(self, uniform: Any, target: Any) -> None:
        """Where the token is."""
        masses, equals = self.partial, self.threads
        own = registers(2)
        store(own, T.float32(0), 0)
        store(own, T.float32(0), 1)
        with self._stretch() as (_, value):
            with when(value > self.threshold):
                store(own, own[0] + value, 0)
            with when(value == self.threshold):
                store(own, own[1] + T.float32(1), 1)
        store(masses, own[0], self.thread)
        store(masses, own[1], equals + self.thread)
        barrier()
        with when(self.thread == 0):
            sums = registers(2)
            store(sums, T.float32(0), 0)
            store(sums, T.float32(0), 1)
            with B.serial(self.threads) as c:
                store(sums, sums[0] + masses[c], 0)
                store(sums, sums[1] + masses[equals + c], 1)
            mass, needed = bind(sums[0]), target - self.above[0]
            # Tokens of probability 0 are never in.
            count = T.Select(
                self.threshold > T.float32(0),
                T.min(T.max(T.ceil(needed / self.threshold), T.float32(1)), sums[1]),
                T.float32(0),
            )
            count = bind(count)
            drawn = bind(uniform * (mass + count * self.threshold))
            in_equals = bind(T.And(drawn >= mass, count > T.float32(0)))
            number = T.min(T.floor((drawn - mass) / self.threshold), count - T.float32(1))
            either(
                in_equals,
                lambda: self._locate(equals, bind(number), 1),
                lambda: self._locate(0, drawn, 0),
            )
        barrier()

    def _locate(self, first: int, goal: Any, kind: int) -> None:
        """Into `found`: the stretch in which sums from `first` on pass `goal`; at most the last
        that has anything."""
        found, masses = self.found, self.partial
        state = registers(2)  # sum so far, 1 if passed
        store(state, T.float32(0), 0)
        store(state, T.float32(0), 1)
        store(found, T.float32(0), 0)
        store(found, T.float32(0), 1)
        store(found, T.float32(kind), 2)
        with B.serial(self.threads) as c:
            mass = bind(masses[first + c])
            with when(T.And(state[1] == T.float32(0), mass > T.float32(0))):
                store(found, T.Cast("float32", c), 0)
                store(found, goal - state[0], 1)
                store(state, state[0] + mass, 0)
                with when(state[0] > goal):
                    store(state, T.float32(1), 1)

    @property
    def owner(self) -> Any:
        """The thread whose stretch has the token."""
        return T.Cast("int32", self.found[0])

    def walk(self) -> Any:
        """The token's place in the row, from its stretch; at most the last one that is in."""
        rest, kind = bind(self.found[1]), bind(self.found[2])
        place = B.alloc_buffer((1,), "int32", scope="local")
        state = registers(2)  # sum so far, 1 if passed
        store(place, T.int32(0), 0)
        store(state, T.float32(0), 0)
        store(state, T.float32(0), 1)
        with self._stretch() as (at, value):
            is_equal = bind(kind == T.float32(1))
            is_in = T.Or(
                T.And(is_equal, value == self.threshold),
                T.And(T.Not(is_equal), value > self.threshold),
            )
            with when(T.And(is_in, state[1] == T.float32(0))):
                store(place, at, 0)
                store(state, state[0] + T.Select(is_equal, T.float32(1), value), 0)
                with when(state[0] > rest):
                    store(state, T.float32(1), 1)
        return place[0]

    def _stretch(self) -> Any:
        return _stretch(self.probs, self.row, self.size, self.thread, self.stretch)


@contextmanager
def _stretch(probs: Any, row: Any, size: int, thread: Any, length: int) -> Iterator[Any]:
    """A loop over the thread's stretch of the row: (place, probability)."""
    first = bind(thread * length)
    with B.serial(T.max(T.min(length, size - first), 0)) as i:
        at = bind(first + i)
        yield at, bind(probs[row, at])
