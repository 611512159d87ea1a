"""Quantized weights times int8 activations, by an instruction set's dot products of bytes.

A step multiplies 4 consecutive k of 16 rows by 4 int8 of a token, into 16 sums; it takes one
register on AVX-512, two on AVX2, four on NEON (see `byte_dots`). What limits full tiles there is
how many words of x a processor can load while it multiplies: tiles of several blocks of rows load
them once for all.

With w = (q - zero) · scale and x = xq · xscale, a group of one row and one token adds

    scale · xscale · (Σ q·xq - zero · Σ xq)

to the result; the integers in brackets are exact. Affine formats have a minimum instead of a zero
point, and add min · Σ x. With two terms (see `activation`) the low ones are added in the same way
after all high ones, for the groups that keep them: for all tokens of a tile at once where most
of them do, else for one after another. Half of the groups that any of 4 tokens keeps are kept by
one alone.

Every number of tokens adds up in the same order, so a token's result does not depend on the batch
it is in, to the last bit.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .activation import GROUP, KEPT_BITS
from .byte_dots import ByteDot
from .control import clear, either
from .dot_words import word_dots
from .int8_activations import Int8Activations
from .packing import PackedWeight
from .tile_prefetch import Ahead
from .vectors import (
    LANES,
    ON_THE_STACK,
    constant,
    dtype_of,
    fma,
    local_array,
    opaque,
    ramp,
    splat,
    to_float,
)
from .weight_groups import (
    PackedGroup,
    PlanesGroup,
    StoredGroup,
    UnpackedBlock,
    UnpackedGroup,
    WeightGroup,
)
from .weight_vectors import prefetch

_SUPPORTED_GROUPS = (16, 32)


def supports(weight: PackedWeight) -> bool:
    """Whether a weight's format has an int8 kernel."""
    return weight.is_quantized and weight.group in _SUPPORTED_GROUPS


def dot_int8(
    weight: PackedWeight,
    blocks: Sequence[tuple[Any, Any]],
    x: Int8Activations,
    first: Any,
    tokens: int,
    unit: ByteDot,
    ahead: Ahead,
) -> list[list[Any]]:
    """Emit x Wᵀ of some blocks of 16 rows and `tokens` tokens from `first` on: for each block a
    vector of rows per token.

    `blocks`: (packed weights, number of the block), all of the form that `weight` describes.
    `ahead`: what it asks for meanwhile.
    """
    if weight.planes:
        return _dot_planes(weight, blocks, x, first, tokens, unit, ahead)
    tile = _Tile(weight, len(blocks), x, first, tokens, unit)
    groups_at = _emit_groups(tile, blocks, ahead)
    tile.emit_low_terms(groups_at)
    return tile.sums()


def dot_upper(
    weight: PackedWeight,
    blocks: Sequence[tuple[Any, Any]],
    x: Int8Activations,
    first: Any,
    tokens: int,
    unit: ByteDot,
    ahead: Ahead,
) -> list[list[Any]]:
    """As `dot_int8`, of the upper plane of a weight and the high term of x alone; the lower 4 bits
    of a q count as 7.5. The starts of x are for `upper_zero`.
    """
    tile = _Tile(weight.upper, len(blocks), x, first, tokens, unit)
    tile.zero_point = upper_zero(weight)
    _emit_groups(tile, blocks, ahead)
    return [[value * constant(16.0) for value in values] for values in tile.sums()]


def upper_zero(weight: PackedWeight) -> Fraction:
    """The zero point of the upper plane that lower bits of 7.5 each leave."""
    return ((weight.format.zero_point or 0) - Fraction(15, 2)) / 16


def _dot_planes(
    weight: PackedWeight,
    blocks: Sequence[tuple[Any, Any]],
    x: Int8Activations,
    first: Any,
    tokens: int,
    unit: ByteDot,
    ahead: Ahead,
) -> list[list[Any]]:
    """`dot_int8` of a weight in two planes."""
    tile = _Tile(weight, len(blocks), x, first, tokens, unit)
    groups_at = _planes_groups(weight, blocks, unit)
    with B.serial(T.int64(weight.num_pairs)) as pair:
        with ahead.in_turn(pair):
            for group in groups_at(pair * 2):
                distance = ahead.distance * len(blocks)
                prefetch(group.packed, group.start, weight.upper.pair_bytes, distance)
                prefetch(group.packed, group.lower_start, weight.lower_pair_bytes, distance)
        for half in (0, 1):
            number = B.Bind(pair * 2 + half)
            tile.emit_group(groups_at(number), number)
    tile.emit_low_terms(groups_at)
    return tile.sums()


def _planes_groups(
    weight: PackedWeight, blocks: Sequence[tuple[Any, Any]], unit: ByteDot
) -> Callable[[Any], list[PlanesGroup]]:
    """The groups of the blocks, by number."""
    upper = weight.upper
    uppers = [opaque(block * upper.block_bytes) for _, block in blocks]
    lowers = [opaque(block * weight.lower_block_bytes + weight.lower_offset) for _, block in blocks]

    def groups_at(group: Any) -> list[PlanesGroup]:
        pair, half = B.Bind(group // 2), B.Bind(group % 2)
        return [
            PlanesGroup(
                weight, unit, packed, B.Bind(base + pair * upper.pair_bytes),
                B.Bind(lower + pair * weight.lower_pair_bytes), half,
            )
            for (packed, _), base, lower in zip(blocks, uppers, lowers, strict=True)
        ]  # fmt: skip

    return groups_at


def _emit_groups(
    tile: "_Tile", blocks: Sequence[tuple[Any, Any]], ahead: Ahead
) -> Callable[[Any], list[PackedGroup]]:
    """Emit all groups of some blocks; the groups of a number."""
    weight, unit = tile.weight, tile.unit
    bases = [opaque(block * weight.block_bytes) for _, block in blocks]
    are_neighbours = len(blocks) > 1 and blocks[0][0].same_as(blocks[1][0])
    with B.serial(T.int64(weight.num_pairs)) as pair:
        read = pair * weight.pair_bytes
        starts = [B.Bind(base + read) for base in bases]
        with ahead.in_turn(pair):
            for (packed, _), start in zip(blocks, starts, strict=True):
                if are_neighbours:  # after the end of a block, its neighbour is read already
                    is_over = read + ahead.distance >= weight.block_bytes
                    skip = T.if_then_else(is_over, weight.block_bytes, 0)
                    start = B.Bind(start + T.Cast("int64", skip))
                prefetch(packed, start, weight.pair_bytes, ahead.distance)
        for half in (0, 1):
            groups = [
                PackedGroup(weight, unit, packed, start, half)
                for (packed, _), start in zip(blocks, starts, strict=True)
            ]
            tile.emit_group(groups, pair * 2 + half)

    return _packed_groups(weight, blocks, unit)


def _packed_groups(
    weight: PackedWeight, blocks: Sequence[tuple[Any, Any]], unit: ByteDot
) -> Callable[[Any], list[PackedGroup]]:
    """The groups of the blocks, by number."""
    bases = [opaque(block * weight.block_bytes) for _, block in blocks]

    def groups_at(group: Any) -> list[PackedGroup]:
        start = group // 2 * weight.pair_bytes
        return [
            PackedGroup(weight, unit, packed, B.Bind(base + start), B.Bind(group % 2))
            for (packed, _), base in zip(blocks, bases, strict=True)
        ]

    return groups_at


def dot_unpacked(block: UnpackedBlock, x: Int8Activations, first: Any, tokens: int) -> list[Any]:
    """The same of one block that is unpacked already: a vector of rows per token."""
    weight = block.weight
    tile = _Tile(weight, 1, x, first, tokens, block.unit)
    with B.serial(T.int64(2 * weight.num_pairs)) as group:
        tile.emit_group([UnpackedGroup(block, group)], group)
    tile.emit_low_terms(lambda group: [UnpackedGroup(block, group)])
    return tile.sums()[0]


def is_of_words(weight: PackedWeight, unit: ByteDot) -> bool:
    """Whether its q are multiplied as 16-bit words."""
    return weight.largest_q > unit.largest_q and unit.multiply_words is not None


def zero_of_sums(weight: PackedWeight, unit: ByteDot) -> int:
    """The zero point of the bytes of q as they come from the groups."""
    is_less = weight.largest_q > unit.largest_q and not is_of_words(weight, unit)
    return (weight.format.zero_point or 0) - (128 if is_less else 0)


def block_groups(
    weight: PackedWeight, blocks: Sequence[tuple[Any, Any]], unit: ByteDot
) -> Callable[[Any], Sequence[StoredGroup]]:
    """The groups of the blocks, by number."""
    if weight.planes:
        return _planes_groups(weight, blocks, unit)
    return _packed_groups(weight, blocks, unit)


def for_bits(bits: Any, emit: Callable[[Any], None]) -> None:
    """`emit(number)` for the bits of an int64 that are set, lowest first."""
    left = B.alloc_buffer((1,), "int64", annotations=ON_THE_STACK)
    B.buffer_store(left, bits, [0])
    with B.While(left[0] != 0):
        bit = opaque(T.call_llvm_pure_intrin("int64", "llvm.cttz.i64", left[0], T.bool(True)))
        B.buffer_store(left, T.bitwise_and(left[0], left[0] - 1), [0])
        emit(bit)


class _Tile:
    """The sums of a tile, and how a group is added to them."""

    def __init__(
        self,
        weight: PackedWeight,
        num_blocks: int,
        x: Int8Activations,
        first: Any,
        tokens: int,
        unit: ByteDot,
    ) -> None:
        self.weight, self.num_blocks, self.x, self.unit = weight, num_blocks, x, unit
        self.acc = local_array(num_blocks * tokens * LANES)
        clear(self.acc, num_blocks * tokens)
        first = opaque(first)
        self.tokens = [first + i for i in range(tokens)]
        self.rows = range(0, LANES, unit.lanes)
        """First rows of the registers of a block."""
        # Where one instruction multiplies and adds, LLVM keeps to the order by itself, but for the
        # registers that minimums take (a tenth of the speed in tiles of 4 and 8 tokens).
        has_minimums = weight.format.is_affine and num_blocks == 1
        needs_room = tokens > 1 and (unit.widen is not None or has_minimums)
        # A single token waits for memory, which is slower where LLVM exchanges two loads.
        is_streaming = tokens == 1 and unit.widen is None
        self.is_ordered = needs_room or is_streaming
        self.zero_point: int | Fraction = zero_of_sums(weight, unit)

    def sums(self) -> list[list[Any]]:
        count = len(self.tokens)
        vectors = [self.acc[ramp(i * LANES)] for i in range(self.num_blocks * count)]
        return [vectors[i : i + count] for i in range(0, len(vectors), count)]

    def emit_group(self, groups: Sequence[WeightGroup], group: Any, term: int = 0) -> None:
        """Groups of the blocks, the `group`th of a term of x."""
        weight, lanes = self.weight, self.unit.lanes
        dots = self._dots(groups, group, term)
        for b, of_block in enumerate(groups):
            for r, row in enumerate(self.rows):
                scale = of_block.scale(row)
                minimum = of_block.minimum(row, scale) if weight.format.is_affine else None
                for i, token in enumerate(self.tokens):
                    at = ramp((b * len(self.tokens) + i) * LANES + row, lanes)
                    value = self.acc[at]
                    if minimum is not None:
                        x_sum = self.x.sum(weight.group, token, group, term)
                        value = fma(minimum, splat(x_sum, lanes), value, lanes)
                    x_scale = self.x.scale(weight.group, token, group, term)
                    dot = to_float(dots[i][b * len(self.rows) + r], lanes)
                    value = fma(dot, scale * splat(x_scale, lanes), value, lanes)
                    B.buffer_store(self.acc, value, [at])

    def emit_low_terms(self, groups_at: Callable[[Any], Sequence[WeightGroup]]) -> None:
        """Emit what low terms add, if there are any; `groups_at(number)` of the blocks."""
        if self.x.kept is None:
            return
        count = len(self.tokens)
        if count == 1:
            self._for_kept(lambda _, number: self.emit_group(groups_at(number), number, term=1))
            return
        # In an array of their own, as LLVM keeps no sums in registers, not even those of the high
        # terms, in one with computed addresses.
        sums = B.alloc_buffer((count, self.num_blocks * LANES), "float32", annotations=ON_THE_STACK)
        for j, at in enumerate(self._places()):
            B.buffer_store(sums, self.acc[ramp(j * LANES)], at)

        def emit_part(first: Any, count: int, number: Any, tokens: Any = None) -> None:
            """Of all `count` tokens, or those with bits in `tokens`: others have no low term."""
            token = self.tokens[0] + first
            part = _Tile(self.weight, self.num_blocks, self.x, token, count, self.unit)
            for j, at in enumerate(part._places(first)):
                B.buffer_store(part.acc, sums[*at], [ramp(j * LANES)])
            part.emit_group(groups_at(number), number, term=1)
            for j, at in enumerate(part._places(first)):
                value = part.acc[ramp(j * LANES)]
                if tokens is not None:
                    bit = T.bitwise_and(T.shift_right(tokens, T.int64(j % count)), T.int64(1))
                    value = T.Select(splat(bit != 0), value, sums[*at])
                B.buffer_store(sums, value, at)

        def emit(tokens: Any, number: Any) -> None:
            with either(T.popcount(tokens) * 3 > 2 * count) as (most, few):
                with most:
                    emit_part(T.int64(0), count, number, tokens)
                with few:
                    for_bits(tokens, lambda i: emit_part(i, 1, number))

        self._for_kept(emit)
        for j, at in enumerate(self._places()):
            B.buffer_store(self.acc, sums[*at], [ramp(j * LANES)])

    def _for_kept(self, emit: Callable[[Any, Any], None]) -> None:
        """`emit(tokens, number)` for the groups whose low terms any token of the tile keeps, first
        to last; `tokens` has the bits of those that do."""
        per_flag = GROUP // self.weight.group
        with B.serial(T.int64(self.x.kept.shape[1])) as word:
            flags = [B.Bind(self.x.kept[token, word]) for token in self.tokens]

            def emit_flag(bit: Any) -> None:
                one = T.int64(1)
                bits = [
                    T.shift_left(T.bitwise_and(T.shift_right(of_token, bit), one), T.int64(i))
                    for i, of_token in enumerate(flags)
                ]
                tokens = B.Bind(functools.reduce(T.bitwise_or, bits))
                group = B.Bind((bit + word * KEPT_BITS) * per_flag)
                for half in range(per_flag):
                    emit(tokens, opaque(group + half))

            for_bits(functools.reduce(T.bitwise_or, flags), emit_flag)

    def _places(self, first: Any = 0) -> list[tuple[Any, Any]]:
        """(token, rows) of the vectors of sums, for tokens from `first` on."""
        blocks, tokens = range(self.num_blocks), range(len(self.tokens))
        return [(first + i, ramp(b * LANES)) for b in blocks for i in tokens]

    def _dots(self, groups: Sequence[WeightGroup], group: Any, term: int) -> list[list[Any]]:
        """Σ (q - zero)·x of a group and a term, int32, by token and register of all blocks'
        rows."""
        unit = self.unit

        def x_words(token: Any, first: int, count: int = 1) -> Any:
            return self.x.words(self.weight.group, token, group, term, first, count)

        starts = [self._minus_zero(i, group, term) for i in range(len(self.tokens))]
        if is_of_words(self.weight, unit):
            if self.weight.planes:
                return self._plane_dots(groups, x_words, starts)
            return self._word_dots(groups, x_words, starts)
        return self._byte_dots([group.words() for group in groups], x_words, starts)

    def _byte_dots(
        self, words: Sequence[Iterator[tuple[int, list[Any]]]], x_words: Any, starts: list[Any]
    ) -> list[list[Any]]:
        """`starts` and Σ q·x of the blocks' words."""
        count = len(words) * len(self.rows)
        sums = self._multiply_add([[start] * count for start in starts], words, x_words)
        return [
            [B.Bind(self.unit.total(each, start)) for each in of_token]
            for of_token, start in zip(sums, starts, strict=True)
        ]

    def _plane_dots(
        self, groups: Sequence[Any], x_words: Any, starts: list[Any]
    ) -> list[list[Any]]:
        """The same of two planes, each by itself."""
        zeros = [splat(T.int32(0), self.unit.lanes) for _ in starts]
        upper = self._byte_dots([group.upper.words() for group in groups], x_words, zeros)
        lower = self._byte_dots([group.lower_words() for group in groups], x_words, starts)
        four = splat(T.int32(4), self.unit.lanes)
        return [
            [B.Bind(T.shift_left(u, four) + v) for u, v in zip(*of_token, strict=True)]
            for of_token in zip(upper, lower, strict=True)
        ]

    def _word_dots(self, groups: Sequence[Any], x_words: Any, starts: list[Any]) -> list[list[Any]]:
        """The same by products of 16-bit words."""
        x = [x_words(token, 0, self.weight.words) for token in self.tokens]
        parts = [
            word_dots(self.unit, self.weight, of.packed, of.q_start, x, starts) for of in groups
        ]
        return [list(itertools.chain(*of_blocks)) for of_blocks in zip(*parts, strict=True)]

    def _minus_zero(self, i: int, group: Any, term: int) -> Any:
        """What the sums of q·x of token number i of the tile lack, in every lane."""
        of, token = self.weight.group, self.tokens[i]
        value = self.x.minus_zero(self.zero_point, of, token, group, term)
        return B.Bind(splat(value, self.unit.lanes))

    def _multiply_add(
        self,
        starts: list[list[Any]],
        words: Sequence[Iterator[tuple[int, list[Any]]]],
        x_words: Any,
    ) -> list[list[Any]]:
        """The sums of the unit that begin with `starts`, int32, and the products of a group's q and
        x, `x_words(token, number)`: by token and register."""
        unit = self.unit
        sums = [list(map(unit.before, of_token)) for of_token in starts]
        for of_blocks in zip(*words, strict=True):
            k = of_blocks[0][0]
            registers = list(itertools.chain(*(of_block for _, of_block in of_blocks)))
            for i, token in enumerate(self.tokens):
                word = splat(x_words(token, k), unit.lanes)
                word = B.Bind(T.reinterpret(dtype_of("int8", 4 * unit.lanes), word))
                for r, q in enumerate(registers):
                    new = unit.multiply_add(sums[i][r], q, word)
                    sums[i][r] = B.Bind(unit.in_order(new) if self.is_ordered else new)
        return sums
