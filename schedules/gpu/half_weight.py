"""Weights as halves, eight at a time, for matrix instructions that take them from shared memory.

What is loaded from memory and what is made of it are apart, so that loads go out early.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tvm.script import tirx as T

from .kernel import bind, floor_div
from .weight import GpuWeight, WeightReader

CHUNK = 8
"""Values along K: 16 bytes of halves."""
_EXACT_INTEGERS = 0x6400
"""The half 1024: its last ten bits count by one."""


def has_chunks(weight: GpuWeight) -> bool:
    """Whether every chunk lies in whole words of one group."""
    if weight.format.bits is None:
        return weight.k % CHUNK == 0
    return weight.step in (4, 8)


class HalfInstructions(Protocol):
    """What a target has for two halves in a uint32, the lower one first."""

    def pack_halves(self, low: Any, high: Any) -> Any:
        """Two float32 rounded to halves."""

    def decode_pair(self, pair: Any, zero: Any, scale: Any, low_end: Any) -> Any:
        """(pair - zero) · scale + low_end, rounded once if pair - zero is a small integer."""

    def byte_pair(self, word: Any, first: int) -> Any:
        """The halves 1024 + byte, of the bytes `first` (0 or 2) and `first` + 1 of a word."""


@dataclass(frozen=True, slots=True)
class HalfReader:
    """Reads a weight in chunks inside a kernel."""

    reader: WeightReader
    instructions: HalfInstructions

    @property
    def num_chunks(self) -> int:
        weight = self.reader.weight
        return weight.num_steps * weight.step // CHUNK

    @property
    def is_copied(self) -> bool:
        """Whether the weight is halves already."""
        fmt = self.reader.weight.format
        return fmt.bits is None and fmt.dtype == "float16"

    def load(self, row: Any, chunk: Any) -> Sequence[Any]:
        """What `decode` needs of a chunk, loaded."""
        fmt = self.reader.weight.format
        if not self._is_decoded_as_halves:
            steps = CHUNK // self.reader.weight.step
            return [
                value
                for i in range(steps)
                for value in self.reader.values(
                    row, bind(chunk * steps + i) if steps > 1 else chunk
                )
            ]
        count = CHUNK // self.reader.weight.step
        words = [bind(self.reader.part("q_weight", row, chunk * count + i)) for i in range(count)]
        group = bind(floor_div(chunk * CHUNK, fmt.group_size))
        scale = bind(self.reader.part("q_scale", row, group))
        if fmt.is_affine:
            return [*words, scale, bind(self.reader.part("q_min", row, group))]
        return [*words, scale]

    def decode(self, loaded: Sequence[Any]) -> Sequence[Any]:
        """Eight halves in four uint32."""
        fmt = self.reader.weight.format
        if not self._is_decoded_as_halves:
            pairs = zip(loaded[::2], loaded[1::2], strict=True)
            return [bind(self.instructions.pack_halves(low, high)) for low, high in pairs]
        offset = T.float16(1024 + (fmt.zero_point or 0))
        if fmt.is_affine:
            *words, scale, low_end = loaded
        else:
            (*words, scale), low_end = loaded, T.float16(0)
        decode = self.instructions.decode_pair
        integers = [pair for word in words for pair in self._integers(word)]
        return [bind(decode(pair, offset, scale, low_end)) for pair in integers]

    @property
    def _is_decoded_as_halves(self) -> bool:
        """Else in float32, and rounded then: where scales are not halves, or bits lie apart."""
        fmt = self.reader.weight.format
        return fmt.bits in (4, 8) and fmt.dtype == "float16"

    def _integers(self, word: Any) -> list[Any]:
        """The values q of a word as halves 1024 + q, two in a uint32."""
        if self.reader.weight.format.bits == 8:
            return [bind(self.instructions.byte_pair(word, first)) for first in (0, 2)]
        base = T.uint32(_EXACT_INTEGERS << 16 | _EXACT_INTEGERS)
        pairs = []
        for i in range(4):
            low = T.shift_right(word, T.uint32(8 * i)) if i else word
            up = 12 - 8 * i
            shift = T.shift_left if up > 0 else T.shift_right
            high = shift(word, T.uint32(abs(up)))
            both = T.bitwise_or(
                T.bitwise_and(low, T.uint32(0xF)), T.bitwise_and(high, T.uint32(0xF0000))
            )
            pairs.append(bind(T.bitwise_or(both, base)))
        return pairs
