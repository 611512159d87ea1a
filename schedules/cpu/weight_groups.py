"""Groups of 16 rows of a quantized weight as the dot products of bytes take them: as they lie in
memory, or unpacked beforehand for many tiles of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .byte_dots import ByteDot
from .packing import PackedWeight
from .vectors import LANES, local_array, ramp, splat
from .weight_vectors import load_min, load_scale, prefetch


class WeightGroup(Protocol):
    """One group along K of 16 rows; registers of `lanes` rows, as the byte dots have them."""

    def words(self) -> Iterator[tuple[int, list[Any]]]:
        """q in the order of their addresses: (first k / 4, for each register of rows 4 consecutive
        k a row). Ones above the unit's largest come as q - 128."""

    def scale(self, row: int) -> Any:
        """The bound scales of the register from `row` on."""

    def minimum(self, row: int, scale: Any) -> Any:
        """The bound minimums of the same rows of an affine format, given their scales."""


class StoredGroup(WeightGroup, Protocol):
    """One that lies in memory."""

    def prefetch(self, distance: int, num_blocks: int = 1) -> None:
        """Ask for what lies `distance` bytes behind it; of `num_blocks` that are read at once, what
        is behind the end of its own lies behind that of all."""


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Group `half` of the pair of groups at byte `start` of a packed weight (see `packing`)."""

    weight: PackedWeight
    unit: ByteDot
    packed: Any
    start: Any
    half: Any

    @property
    def q_start(self) -> Any:
        return self.start + (self.weight.q_offset + self.half * self.weight.q_bytes)

    def words(self) -> Iterator[tuple[int, list[Any]]]:
        yield from _words(self.weight, self.unit, self.packed, self.q_start)

    def prefetch(self, distance: int, num_blocks: int = 1) -> None:
        size = self.weight.pair_bytes // 2
        distance += (num_blocks - 1) * self.weight.block_bytes if distance else 0
        prefetch(self.packed, self.start + self.half * size, size, distance)

    def scale(self, row: int) -> Any:
        return load_scale(self.weight, self.packed, self.start, self.half, row, self.unit.lanes)

    def minimum(self, row: int, scale: Any) -> Any:
        lanes = self.unit.lanes
        return load_min(self.weight, self.packed, self.start, self.half, scale, row, lanes)


@dataclass(frozen=True, slots=True)
class PlanesGroup:
    """Group `half` of a weight in two planes: of the pairs of groups at byte `start` of the upper
    and byte `lower_start` of the lower one."""

    weight: PackedWeight
    unit: ByteDot
    packed: Any
    start: Any
    lower_start: Any
    half: Any

    @property
    def upper(self) -> PackedGroup:
        """The upper 4 bits, with the scales."""
        return PackedGroup(self.weight.upper, self.unit, self.packed, self.start, self.half)

    def lower_words(self) -> Iterator[tuple[int, list[Any]]]:
        """The lower 4 bits, as `words`."""
        upper = self.weight.upper
        q_start = self.lower_start + self.half * upper.q_bytes
        yield from _words(upper, self.unit, self.packed, q_start)

    def prefetch(self, distance: int, num_blocks: int = 1) -> None:
        self.upper.prefetch(distance, num_blocks)
        size = self.weight.lower_pair_bytes // 2
        distance += (num_blocks - 1) * self.weight.lower_block_bytes if distance else 0
        prefetch(self.packed, self.lower_start + self.half * size, size, distance)

    def words(self) -> Iterator[tuple[int, list[Any]]]:
        width = 4 * self.unit.lanes
        four, sign = splat(T.uint8(4), width), splat(T.uint8(128), width)
        for (k, high), (_, low) in zip(self.upper.words(), self.lower_words(), strict=True):
            both = zip(high, low, strict=True)
            words = [T.bitwise_or(T.shift_left(u, four), lower) for u, lower in both]
            if self.unit.largest_q < self.weight.largest_q:
                words = [T.bitwise_xor(word, sign) for word in words]
            yield k, [B.Bind(word) for word in words]

    def scale(self, row: int) -> Any:
        return self.upper.scale(row)

    def minimum(self, row: int, scale: Any) -> Any:
        lanes = self.unit.lanes
        return load_min(self.weight, self.packed, self.start, self.half, scale, row, lanes)


def _words(
    weight: PackedWeight, unit: ByteDot, packed: Any, q_start: Any
) -> Iterator[tuple[int, list[Any]]]:
    """`WeightGroup.words` of the group whose q begin at byte `q_start`."""
    width = 4 * unit.lanes
    for j in range(weight.words):
        at = range(64 * j, 64 * (j + 1), width)
        words = [B.Bind(packed[ramp(q_start + byte, width)]) for byte in at]
        if weight.is_nibbles:
            four, mask = splat(T.uint8(4), width), splat(T.uint8(15), width)
            yield j, [B.Bind(T.bitwise_and(word, mask)) for word in words]
            yield j + weight.words, [B.Bind(T.shift_right(word, four)) for word in words]
        elif weight.largest_q > unit.largest_q:
            sign = splat(T.uint8(128), width)
            yield j, [B.Bind(T.bitwise_xor(word, sign)) for word in words]
        else:
            yield j, words


class UnpackedBlock:
    """A thread's own memory, on the stack, for a block of 16 rows at a time: `load` fills it.

    q         [groups][K of a group / 4][16 rows] of 4 bytes
    scales    [groups][16 rows] float32
    minimums  likewise; only in affine formats
    """

    def __init__(self, weight: PackedWeight, unit: ByteDot) -> None:
        self.weight, self.unit = weight, unit
        num_rows = 2 * weight.num_pairs * LANES
        q_bytes = num_rows * weight.group
        self.q = local_array(q_bytes, "uint8")
        self.scales = local_array(num_rows)
        self.minimums = local_array(num_rows) if weight.format.is_affine else None

    @staticmethod
    def num_bytes(weight: PackedWeight) -> int:
        """What a block of a weight takes."""
        num_floats = 2 if weight.format.is_affine else 1
        return 2 * weight.num_pairs * LANES * (weight.group + 4 * num_floats)

    def load(self, packed: Any, block: Any) -> None:
        """Emit the unpacking of a packed weight's block of that number."""
        weight = self.weight
        base = B.Bind(block * weight.block_bytes)
        with B.serial(T.int64(weight.num_pairs)) as pair:
            start = B.Bind(base + pair * weight.pair_bytes)
            for half in (0, 1):
                group = PackedGroup(weight, self.unit, packed, start, half)
                to = UnpackedGroup(self, B.Bind(pair * 2 + half))
                for k, registers in group.words():
                    for at, q in zip(to.words_at(k), registers, strict=True):
                        B.buffer_store(self.q, q, [at])
                for row in range(0, LANES, self.unit.lanes):
                    scale = group.scale(row)
                    B.buffer_store(self.scales, scale, [to.rows_at(row)])
                    if self.minimums is not None:
                        minimum = group.minimum(row, scale)
                        B.buffer_store(self.minimums, minimum, [to.rows_at(row)])


@dataclass(frozen=True, slots=True)
class UnpackedGroup:
    """Group `number` of an unpacked block."""

    block: UnpackedBlock
    number: Any

    def words(self) -> Iterator[tuple[int, list[Any]]]:
        for k in range(self.block.weight.group // 4):
            yield k, [B.Bind(self.block.q[at]) for at in self.words_at(k)]

    def scale(self, row: int) -> Any:
        return B.Bind(self.block.scales[self.rows_at(row)])

    def minimum(self, row: int, scale: Any) -> Any:
        assert self.block.minimums is not None
        return B.Bind(self.block.minimums[self.rows_at(row)])

    def words_at(self, k: int) -> list[Any]:
        """Where the registers of 4 consecutive k are."""
        start = self.number * (self.block.weight.group * LANES) + k * (4 * LANES)
        width = 4 * self.block.unit.lanes
        return [ramp(start + byte, width) for byte in range(0, 4 * LANES, width)]

    def rows_at(self, row: int) -> Any:
        """Where the floats of a register of rows are."""
        return ramp(self.number * LANES + row, self.block.unit.lanes)
