"""Weights as halves, eight at a time, for matrix instructions that take them from shared memory.

What is loaded from memory and what is made of it are apart, so that loads go out early.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from .cuda_instructions import byte_perm, decode_pair, pack_halves
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


@dataclass(frozen=True, slots=True)
class HalfReader:
    """Reads a weight in chunks inside a kernel."""

    reader: WeightReader

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
            return [bind(pack_halves(low, high)) for low, high in pairs]
        offset = T.float16(1024 + (fmt.zero_point or 0))
        if fmt.is_affine:
            *words, scale, low_end = loaded
        else:
            (*words, scale), low_end = loaded, T.float16(0)
        integers = [pair for word in words for pair in _integers(word, fmt.bits or 0)]
        return [bind(decode_pair(pair, offset, scale, low_end)) for pair in integers]

    @property
    def _is_decoded_as_halves(self) -> bool:
        """Else in float32, and rounded then: where scales are not halves, or bits lie apart."""
        fmt = self.reader.weight.format
        return fmt.bits in (4, 8) and fmt.dtype == "float16"


def _integers(word: Any, bits: int) -> list[Any]:
    """The values q of a word as halves 1024 + q, two in a uint32."""
    if bits == 8:
        return [bind(byte_perm(word, T.uint32(0x64646464), s)) for s in (0x4140, 0x4342)]
    base = T.uint32(_EXACT_INTEGERS << 16 | _EXACT_INTEGERS)
    pairs = []
    for i in range(4):
        low = T.shift_right(word, T.uint32(8 * i)) if i else word
        up = 12 - 8 * i
        high = T.shift_left(word, T.uint32(up)) if up > 0 else T.shift_right(word, T.uint32(-up))
        both = T.bitwise_or(
            T.bitwise_and(low, T.uint32(0xF)), T.bitwise_and(high, T.uint32(0xF0000))
        )
        pairs.append(bind(T.bitwise_or(both, base)))
    return pairs
