"""What attention has of some rows after some of their keys, and how two such parts make one.

For each of a number of query vectors: the largest score so far, the total of 2^(score - largest) in
16 lanes, and the values summed with those weights. Parts are merged with explicit fused
multiply-adds, so that the result does not depend on what a compiler fuses where. A part that has
seen no keys changes nothing, not a bit, and becomes the part that it is merged with.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .vectors import (
    LANES,
    constant,
    exp2,
    fma,
    local_array,
    ramp,
    reduce_sum,
    splat,
    vector_width,
)  # fmt: skip

LOWEST_MAXIMUM = -1.0e29
"""Where maxima start: so far above the scores of masked keys that those weigh exactly 0, always."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """Elements of a head that make one vector."""
        return vector_width(self.head_dim)

    @property
    def num_chunks(self) -> int:
        """Vectors in a head."""
        return self.head_dim // self.width

    def __str__(self) -> str:
        return f"{self.num_heads}_{self.num_kv_heads}_{self.head_dim}"


def merged_maxima(own: Any, other: Any) -> tuple[Any, Any, Any]:
    """Of 16 maxima of two parts each: the larger ones, and what the weights of the one and of the
    other part are to be scaled by."""
    own, other = B.Bind(own), B.Bind(other)
    maximum = B.Bind(T.max(own, other))
    smaller, one = exp2(T.min(own, other) - maximum), constant(1.0)
    return maximum, T.Select(own >= other, one, smaller), T.Select(other >= own, one, smaller)


class Part(Protocol):
    """A state that can be read, for vector `v` and elements `c · width …` of its sums."""

    def maximum(self, v: Any) -> Any: ...
    def total(self, v: Any) -> Any: ...
    def sums(self, v: Any, c: Any) -> Any: ...


class State:
    """A state of `num_vectors` query vectors, on the stack: one of several places for such."""

    def __init__(self, heads: Heads, num_vectors: int, *, num_places: int = 1) -> None:
        self.heads, self.num_vectors, self._first = heads, num_vectors, T.int32(0)
        size = num_places * padded(num_vectors)
        self._maxima = local_array(size)
        self._totals = local_array(size * LANES)
        self._sums = local_array(size * heads.head_dim)

    def place(self, number: Any) -> "State":
        """The state in another place, int32."""
        other = copy(self)
        other._first = number * padded(self.num_vectors)
        return other

    def maximum(self, v: Any) -> Any:
        return self._maxima[self._first + v]

    def total(self, v: Any) -> Any:
        """The total in 16 lanes."""
        return self._totals[ramp((self._first + v) * LANES)]

    def inverse(self, v: Any) -> Any:
        """What the sums are to be multiplied by in the end."""
        return B.Bind(T.float32(1) / reduce_sum(self.total(v)))

    def sums(self, v: Any, c: Any) -> Any:
        return self._sums[self._at(v, c)]

    def _at(self, v: Any, c: Any) -> Any:
        start = (self._first + v) * self.heads.head_dim + c * self.heads.width
        return ramp(start, self.heads.width)

    def clear(self) -> None:
        """No keys seen."""
        for first in range(0, self.num_vectors, LANES):
            B.buffer_store(self._maxima, constant(LOWEST_MAXIMUM), [ramp(self._first + first)])
        with B.serial(self.num_vectors) as v:
            B.buffer_store(self._totals, constant(0.0), [ramp((self._first + v) * LANES)])
            with B.serial(self.heads.num_chunks) as c:
                B.buffer_store(self._sums, constant(0.0, self.heads.width), [self._at(v, c)])

    def merge_maxima(self, maxima: Any, own_factors: Any, other_factors: Any) -> None:
        """The `maxima` of a part; what both parts' weights are to be scaled by → the two arrays."""
        for first in range(0, self.num_vectors, LANES):
            at, own_at = ramp(first), ramp(self._first + first)
            maximum, own, other = merged_maxima(self._maxima[own_at], maxima[at])
            B.buffer_store(self._maxima, maximum, [own_at])
            B.buffer_store(own_factors, own, [at])
            B.buffer_store(other_factors, other, [at])

    def merge_total(self, v: Any, total: Any, own_factor: Any, other_factor: Any) -> None:
        """The total of a part, in 16 lanes; factors are scalars."""
        scaled = B.Bind(total * splat(other_factor))
        new = fma(self.total(v), splat(own_factor), scaled, LANES)
        B.buffer_store(self._totals, new, [ramp((self._first + v) * LANES)])

    def merge_sums(self, v: Any, c: Any, sums: Any, own_factor: Any, other_factor: Any) -> None:
        """The sums of a part; factors are scalars."""
        width = self.heads.width
        scaled = B.Bind(sums * splat(other_factor, width))
        new = fma(self.sums(v, c), splat(own_factor, width), scaled, width)
        B.buffer_store(self._sums, new, [self._at(v, c)])

    def merge(self, part: Part) -> None:
        """The keys of `part` as well."""
        factors = local_array(2 * LANES)
        with B.serial(self.num_vectors) as v:
            maxima = B.Bind(self.maximum(v)), B.Bind(part.maximum(v))
            _, own, other = merged_maxima(*map(splat, maxima))
            B.buffer_store(self._maxima, T.max(*maxima), [self._first + v])
            B.buffer_store(factors, own, [ramp(0)])
            B.buffer_store(factors, other, [ramp(LANES)])
            own_factor, other_factor = B.Bind(factors[0]), B.Bind(factors[LANES])
            self.merge_total(v, part.total(v), own_factor, other_factor)
            with B.serial(self.heads.num_chunks) as c:
                self.merge_sums(v, c, part.sums(v, c), own_factor, other_factor)


def padded(size: int) -> int:
    """The multiple of vectors that holds so many elements."""
    return -(-size // LANES) * LANES


def stored_size(heads: Heads) -> int:
    """Float32 values of one stored state, a multiple of vectors: sums, total, maximum, nothing."""
    return padded(heads.head_dim) + 2 * LANES


@dataclass(frozen=True, slots=True)
class StoredParts:
    """States of one row for each sequence and split, in a buffer."""

    buffer: Any
    heads: Heads

    def save(self, state: State, sequence: Any, split: Any, kv_head: Any) -> None:
        """The state of the query heads that share a key head."""
        with B.serial(self.heads.group) as v:
            start = self.start(split, kv_head * self.heads.group + v)
            with B.serial(self.heads.num_chunks) as c:
                at = ramp(start + c * self.heads.width, self.heads.width)
                B.buffer_store(self.buffer, state.sums(v, c), [sequence, at])
            after = start + padded(self.heads.head_dim)
            B.buffer_store(self.buffer, state.total(v), [sequence, ramp(after)])
            B.buffer_store(self.buffer, state.maximum(v), [sequence, after + LANES])

    def load(self, sequence: Any, split: Any, head: Any) -> "StoredPart":
        return StoredPart(self, sequence, B.Bind(self.start(split, head)))

    def start(self, split: Any, head: Any) -> Any:
        return (split * self.heads.num_heads + head) * stored_size(self.heads)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored state of one query vector, as a `Part`."""

    parts: StoredParts
    sequence: Any
    start: Any

    def maximum(self, v: Any) -> Any:
        return self._read(padded(self.parts.heads.head_dim) + LANES)

    def total(self, v: Any) -> Any:
        return self._read(padded(self.parts.heads.head_dim), LANES)

    def sums(self, v: Any, c: Any) -> Any:
        return self._read(c * self.parts.heads.width, self.parts.heads.width)

    def _read(self, offset: Any, width: int = 1) -> Any:
        return self.parts.buffer[self.sequence, ramp(self.start + offset, width)]
