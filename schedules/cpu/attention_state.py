"""What attention has of some rows after some of their keys, and how two such parts make one.

For each of a number of query vectors: the largest score so far, the total of 2^(score - largest),
and the values summed with those weights. Parts are merged with explicit fused multiply-adds, so
that the result does not depend on what a compiler fuses where.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .vectors import LANES, constant, exp2, fma, local_array, ramp, splat, vector_width

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


class Part(Protocol):
    """A state that can be read, for vector `v` and elements `c · width …` of its sums."""

    def maximum(self, v: Any) -> Any: ...
    def total(self, v: Any) -> Any: ...
    def sums(self, v: Any, c: Any) -> Any: ...


class State:
    """The state of `num_vectors` query vectors, on the stack."""

    def __init__(self, heads: Heads, num_vectors: int) -> None:
        self.heads, self.num_vectors = heads, num_vectors
        self._sums = local_array(num_vectors * heads.head_dim)
        self._maxima, self._totals = local_array(num_vectors), local_array(num_vectors)

    def maximum(self, v: Any) -> Any:
        return self._maxima[v]

    def total(self, v: Any) -> Any:
        return self._totals[v]

    def sums(self, v: Any, c: Any) -> Any:
        return self._sums[self._at(v, c)]

    def set_weights(self, v: Any, maximum: Any, total: Any) -> None:
        B.buffer_store(self._maxima, maximum, [v])
        B.buffer_store(self._totals, total, [v])

    def set_sums(self, v: Any, c: Any, value: Any) -> None:
        B.buffer_store(self._sums, value, [self._at(v, c)])

    def _at(self, v: Any, c: Any) -> Any:
        return ramp(v * self.heads.head_dim + c * self.heads.width, self.heads.width)

    def clear(self) -> None:
        """No keys seen."""
        with B.serial(self.num_vectors) as v:
            self.set_weights(v, T.float32(LOWEST_MAXIMUM), T.float32(0))
            with B.serial(self.heads.num_chunks) as c:
                self.set_sums(v, c, constant(0.0, self.heads.width))

    def merge(self, part: Part) -> None:
        """The keys of `part` as well. One that has seen no keys changes nothing, not a bit."""
        width = self.heads.width
        factors = local_array(2 * LANES)
        with B.serial(self.num_vectors) as v:
            maximum = B.Bind(T.max(self.maximum(v), part.maximum(v)))
            B.buffer_store(factors, exp2(splat(self.maximum(v) - maximum)), [ramp(0)])
            B.buffer_store(factors, exp2(splat(part.maximum(v) - maximum)), [ramp(LANES)])
            other = B.Bind(part.total(v) * factors[LANES])
            self.set_weights(v, maximum, fma(self.total(v), factors[0], other))
            with B.serial(self.heads.num_chunks) as c:
                scaled = B.Bind(part.sums(v, c) * factors[ramp(LANES, width)])
                own = B.Bind(self.sums(v, c))
                self.set_sums(v, c, fma(own, factors[ramp(0, width)], scaled, width))


def stored_size(heads: Heads) -> int:
    """Float32 values of one stored state, a multiple of vectors: sums, maximum, total, nothing."""
    return -(-heads.head_dim // LANES) * LANES + LANES


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
            after = start + (stored_size(self.heads) - LANES)
            B.buffer_store(self.buffer, state.maximum(v), [sequence, after])
            B.buffer_store(self.buffer, state.total(v), [sequence, after + 1])

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
        return self._read(stored_size(self.parts.heads) - LANES)

    def total(self, v: Any) -> Any:
        return self._read(stored_size(self.parts.heads) - LANES + 1)

    def sums(self, v: Any, c: Any) -> Any:
        return self._read(c * self.parts.heads.width, self.parts.heads.width)

    def _read(self, offset: Any, width: int = 1) -> Any:
        return self.parts.buffer[self.sequence, ramp(self.start + offset, width)]
