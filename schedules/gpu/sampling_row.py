"""What a block of threads finds in a row of logits: its highest, sums, and bounds of what is kept.

Nothing is sorted. A bound is found digit by digit, from the top: each pass over the row adds what
counts to a bin for each digit, of which every thread has its own, so that none waits for another.
Logits are compared as integers and weights are summed as integers: neither the number of threads
nor their order can change a result.

    logit        ··· -2.0  -1.0  0.0  1.0  2.0 ···
    its place    ···    4     3    2    1    0      uint32: 0 is the highest
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .kernel import (
    barrier,
    bind,
    ceil_div,
    floor_div,
    floor_mod,
    load_vector,
    registers,
    settled,
    share,
    shared,
    store,
    vector_width,
    when,
)
from .limits import GpuLimits
from .wide_integers import Wide, WideRegister

_INFINITY, _MINUS_INFINITY, _NOWHERE = 0x007FFFFF, 0xFF800000, 0xFFFFFFFF
"""Places of the infinities; what lies outside of them is no number. The last is no logit's."""
LAST_ID = 0x7FFFFFFF
_DIGIT_BITS = 3
_NUM_BINS = 1 << _DIGIT_BITS
_NUM_DIGITS = -(-32 // _DIGIT_BITS)
_BIN_WORDS = 3
"""Of each bin: the two of a sum, and how many ids it is of."""
FRACTION_BITS = 40
"""Of weights, of which the largest is 1: 2^18 of them fill 58 of 64 bits."""
_MANTISSA_BITS = 23

Keep = Callable[[Any, Any], Any]
"""(id, place) → whether it counts."""
Measure = Callable[[Any], Wide]
"""Place → what it counts for."""


class Bound(NamedTuple):
    """The first place up to which a measure reaches what was wanted."""

    place: Any
    before: Wide
    """Measure of all before it."""
    is_whole: Any
    """Whether the kept up to that place are what was sought; else some of those at it may be more
    than that."""


def num_threads(limits: GpuLimits) -> int:
    """Threads of a block: a power of two, of which shared memory has room for the bins. With more
    than 256, compilers save on registers until some spill."""
    threads = 256
    words = _BIN_WORDS * (_NUM_BINS + 1)
    while threads > limits.max_threads or 4 * words * threads > limits.shared_bytes:
        threads //= 2
    return threads


class RowBlock:
    """Emits what a block of threads does with `logits[row, :num_ids]`; made inside its launch.

    All threads of the block call every method, with the same arguments.
    """

    def __init__(self, logits: Any, row: Any, num_ids: Any, *, thread: Any, threads: int) -> None:
        self._logits, self._row, self.num_ids = logits, row, num_ids
        self._thread, self._threads = thread, threads
        id_bits = (int(logits.shape[1]) - 1).bit_length()
        self._id_digits = max(1, -(-id_bits // _DIGIT_BITS))
        self._bins = shared(_BIN_WORDS * _NUM_BINS * threads, "uint32")
        self._partials = shared(_BIN_WORDS * threads, "uint32")

    @contextmanager
    def _each(self, first: Any, count: Any) -> Iterator[tuple[Any, Any]]:
        """A loop over (id, place) of `count` ids from `first` on, a multiple of 4. A thread's ids
        ascend, and are read four at a time, so that more of them are on their way."""
        width = vector_width(int(self._logits.shape[1]))
        end = settled(first + count)
        first_vector = settled(floor_div(first, width))
        with share(ceil_div(count, width), self._thread, self._threads) as i:
            start = (first_vector + i) * width
            places = registers(width, "uint32")
            for j, logit in enumerate(load_vector(self._logits, (self._row,), start, width)):
                store(places, place_of(logit), j)
            with B.serial(width) as j:
                token_id = settled(start + j)
                with when(token_id < end):
                    yield token_id, bind(places[j])

    @contextmanager
    def _halving(self) -> Iterator[Any]:
        """A loop in which the lower half of the threads takes in the upper half, to the end."""
        with B.serial((self._threads - 1).bit_length()) as turn:
            half = settled(T.shift_right(T.int32(self._threads // 2), turn))
            barrier()
            with when(self._thread < half):
                yield half
        barrier()

    # ---- the highest

    def find_highest(self) -> None:
        """Set `highest`, its place and id (the lowest of equals), and `is_number`: no logit is NaN
        and the highest is finite."""
        best, lowest = self._best(lambda token_id, place: T.bool(True))
        self.highest_place, self.highest_id = best
        self.highest = settled(logit_of(self.highest_place))
        is_finite = T.And(
            self.highest_place > T.uint32(_INFINITY),
            self.highest_place < T.uint32(_MINUS_INFINITY),
        )
        self.is_number = T.And(is_finite, lowest <= T.uint32(_MINUS_INFINITY))

    def next_highest(self, after_place: Any, after_id: Any) -> tuple[Any, Any]:
        """(place, id) of the next logit, highest first, and of equals the lowest id first; the id
        is -1 if there is none."""
        best, _ = self._best(
            lambda token_id, place: T.Or(
                place > after_place, T.And(place == after_place, token_id > after_id)
            )
        )
        return best

    def _best(self, keep: Keep) -> tuple[tuple[Any, Any], Any]:
        """((highest place, its lowest id), lowest place) of what is kept."""
        thread, threads, bins = self._thread, self._threads, self._bins
        places, ids = registers(2, "uint32"), registers(1, "int32")
        store(places, T.uint32(_NOWHERE), 0)
        store(places, T.uint32(0), 1)
        store(ids, T.int32(-1), 0)
        with self._each(T.int32(0), self.num_ids) as (token_id, place):
            with when(T.And(place < places[0], keep(token_id, place))):
                store(places, place, 0)
                store(ids, token_id, 0)
            store(places, T.max(places[1], place), 1)
        barrier()  # what was in the bins is no longer read
        # Ids as uint32: that of nothing is above all others.
        for i, value in enumerate((places[0], T.Cast("uint32", ids[0]), places[1])):
            store(bins, value, i * threads + thread)
        with self._halving() as half:
            here = [bind(bins[i * threads + thread]) for i in range(3)]
            other = [bind(bins[i * threads + thread + half]) for i in range(3)]
            is_first = T.Or(other[0] < here[0], T.And(other[0] == here[0], other[1] < here[1]))
            with when(is_first):
                store(bins, other[0], thread)
                store(bins, other[1], threads + thread)
            store(bins, T.max(here[2], other[2]), 2 * threads + thread)
        best = bind(bins[0]), settled(T.Cast("int32", bins[threads]))
        return best, bind(bins[2 * threads])

    # ---- sums

    def weight(self, place: Any, inverse_temperature: Any) -> Wide:
        """2^((logit - highest) · inverse_temperature), in units of 2^-FRACTION_BITS."""
        return _exp2((logit_of(place) - self.highest) * inverse_temperature)

    def total(self, measure: Measure, keep: Keep) -> Wide:
        thread, threads, partials = self._thread, self._threads, self._partials
        own = WideRegister()
        with self._each(T.int32(0), self.num_ids) as (token_id, place):
            with when(keep(token_id, place)):
                own.add(measure(place))
        barrier()  # partial sums before are no longer read
        self._put_partial(own.get(), thread)
        with self._halving() as half:
            both = self._partial(thread).plus(self._partial(thread + half))
            self._put_partial(both, thread)
        return Wide(bind(partials[0]), bind(partials[threads]))

    def _partial(self, at: Any) -> Wide:
        return Wide(bind(self._partials[at]), bind(self._partials[self._threads + at]))

    def _put_partial(self, value: Wide, at: Any) -> None:
        store(self._partials, value.high, at)
        store(self._partials, value.low, self._threads + at)

    # ---- bounds

    def first_place(self, measure: Measure, keep: Keep, wanted: Wide) -> Bound:
        """By places: up to which the kept measure as much as `wanted`, which is not 0; the last if
        all measure less. If it is whole, the place may be any up to the next logit's."""
        return self._first(measure, keep, wanted, by_id=False)

    def first_id(self, measure: Measure, keep: Keep, wanted: Wide) -> Any:
        """By ids: the first up to which the kept measure as much as `wanted` (see above)."""
        return settled(T.Cast("int32", self._first(measure, keep, wanted, by_id=True).place))

    def _first(self, measure: Measure, keep: Keep, wanted: Wide, *, by_id: bool) -> Bound:
        prefix, digits_left = registers(1, "uint32"), registers(1, "int32")
        is_whole, before = registers(1, "int32"), WideRegister()
        store(prefix, T.uint32(0), 0)
        store(digits_left, T.int32(self._id_digits if by_id else _NUM_DIGITS), 0)
        store(is_whole, T.int32(0), 0)
        with B.While(T.And(digits_left[0] > 0, is_whole[0] == 0)):
            left = settled(digits_left[0] - 1)
            shift = settled(T.Cast("uint32", left * _DIGIT_BITS))
            known = bind(prefix[0])
            self._clear_bins()
            first, count = T.int32(0), self.num_ids
            if by_id:  # ids that begin with the digits known so far
                first = settled(T.Cast("int32", known))
                room = T.shift_left(T.int32(1), (left + 1) * _DIGIT_BITS)
                count = settled(T.min(room, self.num_ids - first))
            with self._each(first, count) as (token_id, place):
                is_near = keep(token_id, place)
                if not by_id:
                    other = T.shift_right(T.bitwise_xor(place, known), shift)
                    other = T.shift_right(other, T.uint32(_DIGIT_BITS))
                    is_near = T.And(other == T.uint32(0), is_near)
                with when(is_near):
                    key = T.Cast("uint32", token_id) if by_id else place
                    digit = T.bitwise_and(T.shift_right(key, shift), T.uint32(_NUM_BINS - 1))
                    self._add_to_bin(T.Cast("int32", digit), measure(place))
            self._sum_bins()
            found, is_reached = registers(1, "int32"), registers(1, "int32")
            reached = WideRegister()
            store(found, T.int32(0), 0)
            store(is_reached, T.int32(0), 0)
            reached.set(before.get())
            with B.serial(_NUM_BINS) as digit:
                start, part = reached.get(), self._partial(digit)
                # The last that has anything, should a weight be rounded otherwise than in `wanted`.
                with when(T.And(is_reached[0] == 0, T.Not(part.is_equal(Wide.of(0))))):
                    end = start.plus(part)
                    store(found, digit, 0)
                    before.set(start)
                    reached.set(end)
                    store(is_reached, T.Cast("int32", T.Not(end.is_below(wanted))), 0)
                    if not by_id:
                        is_one = self._partials[2 * self._threads + digit] == T.uint32(1)
                        is_last = T.And(is_one, T.Not(end.is_below(wanted)))
                        store(is_whole, T.Cast("int32", T.Or(is_last, end.is_equal(wanted))), 0)
            digit = T.shift_left(T.Cast("uint32", found[0]), shift)
            # All that have these digits, if they are what is sought.
            whole = T.Cast("uint32", is_whole[0])
            rest = T.shift_left(whole, shift) - whole
            store(prefix, T.bitwise_or(T.bitwise_or(known, digit), rest), 0)
            store(digits_left, left, 0)
        return Bound(bind(prefix[0]), before.get(), is_whole[0] != 0)

    def _clear_bins(self) -> None:
        barrier()  # they are no longer read
        for i in range(_BIN_WORDS * _NUM_BINS):
            store(self._bins, T.uint32(0), i * self._threads + self._thread)

    def _add_to_bin(self, digit: Any, value: Wide) -> None:
        at = settled(digit * (_BIN_WORDS * self._threads) + self._thread)
        total, count = self._at(self._bins, at)
        self._put(self._bins, at, total.plus(value), count + T.uint32(1))

    def _sum_bins(self) -> None:
        """All threads' bins into the first partial sums, one for each digit."""
        thread, threads = self._thread, self._threads
        lanes = threads // _NUM_BINS
        digit, lane = bind(floor_div(thread, lanes)), bind(floor_mod(thread, lanes))
        barrier()
        first = digit * (_BIN_WORDS * threads) + lane
        own, count = self._sum(_NUM_BINS, lambda i: first + i * lanes)
        barrier()  # bins are read, partial sums before as well
        self._put(self._bins, thread, own, count)
        barrier()
        with when(thread < _NUM_BINS):
            own, count = self._sum(lanes, lambda i: thread * lanes + i)
            self._put(self._partials, thread, own, count)
        barrier()

    def _sum(self, num: int, place: Callable[[Any], Any]) -> tuple[Wide, Any]:
        """Sum and count of `num` bins."""
        total, counts = WideRegister(), registers(1, "uint32")
        store(counts, T.uint32(0), 0)
        with B.serial(num) as i:
            part, count = self._at(self._bins, settled(place(i)))
            total.add(part)
            store(counts, counts[0] + count, 0)
        return total.get(), bind(counts[0])

    def _at(self, array: Any, at: Any) -> tuple[Wide, Any]:
        high, low, count = (bind(array[at + i * self._threads]) for i in range(_BIN_WORDS))
        return Wide(high, low), count

    def _put(self, array: Any, at: Any, value: Wide, count: Any) -> None:
        for i, word in enumerate((value.high, value.low, count)):
            store(array, word, at + i * self._threads)


def place_of(logit: Any) -> Any:
    """The place of a float32 in the order of all, from the highest; both zeros have one."""
    bits = bind(T.reinterpret("uint32", logit))
    bits = settled(T.Select(bits == T.uint32(1 << 31), T.uint32(0), bits))
    return settled(_flip(bits))


def logit_of(place: Any) -> Any:
    return T.reinterpret("float32", _flip(place))


def _flip(bits: Any) -> Any:
    """Bits of a number → its place, and back. Of negative ones they are the same."""
    is_negative = bits >= T.uint32(1 << 31)
    return T.Select(is_negative, bits, T.bitwise_xor(bits, T.uint32(0x7FFFFFFF)))


def _exp2(x: Any) -> Wide:
    """2^x in units of 2^-FRACTION_BITS, for x up to 0; relative error below 3e-7 before rounding.

    2^fraction by a minimax polynomial of degree 5, fitted for relative error on [0, 1] with
    p(0) = 1: the exponential functions of GPUs are good to some hundred units in the last place.
    """
    x = settled(T.max(x, T.float32(-64)))  # nothing is left of it
    whole = settled(T.floor(x))
    fraction = settled(x - whole)
    p = T.float32(1.86713118e-3)
    for c in (9.01702723e-3, 5.57999162e-2, 2.40164449e-1, 6.93151312e-1, 1.0):
        p = p * fraction + T.float32(c)
    mantissa = settled(T.Cast("uint32", p * T.float32(1 << _MANTISSA_BITS)))
    shift = settled(T.Cast("int32", whole) + (FRACTION_BITS - _MANTISSA_BITS))
    left = settled(T.Cast("uint32", T.max(shift, 0)))
    right = settled(T.Cast("uint32", T.min(T.max(-shift, 0), 31)))
    # In two steps: no shift by 32.
    high = T.shift_right(T.shift_right(mantissa, T.uint32(1)), T.uint32(31) - left)
    return Wide(settled(high), settled(T.shift_right(T.shift_left(mantissa, left), right)))
