"""Quantized weights times int8 activations, by an instruction set's dot products of bytes.

A step multiplies 4 consecutive k of 16 rows by 4 int8 of a token, into 16 sums; it takes one
register on AVX-512, two on AVX2, four on NEON (see `byte_dots`). What limits full tiles there is
how many words of x a processor can load while it multiplies: tiles of several blocks of rows load
them once for all.

With w = (q - zero) · scale and x = xq · xscale, a group of one row and one token adds

    scale · xscale · (Σ q·xq - zero · Σ xq)

to the result; the integers in brackets are exact. Affine formats have a minimum instead of a zero
point, and add min · Σ x. With two terms (see `activation`) the products with the high one count 256
times.

Every number of tokens adds up in the same order, so a token's result does not depend on the batch
it is in, to the last bit.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .activation import GROUP, HIGH_BITS
from .byte_dots import ByteDot
from .control import clear
from .dot_words import word_dots
from .packing import PackedWeight
from .vectors import LANES, ON_THE_STACK, dtype_of, fma, local_array, opaque, ramp, splat, to_float
from .weight_groups import PackedGroup, UnpackedBlock, UnpackedGroup, WeightGroup
from .weight_vectors import prefetch

_SUPPORTED_GROUPS = (16, 32)
_FEW_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Int8Activations:
    """The buffers of `activation.activation_buffers`."""

    xq: Any
    scales: Any
    sums: Any
    steps: Any
    terms: int

    @property
    def term_words(self) -> int:
        """Words of a token and a term."""
        return int(self.xq.shape[1]) // self.terms

    def scale_and_sums(self, group_size: int, token: Any, group: Any) -> tuple[Any, Any, Any]:
        """Of one group of a token: the scale, Σ x, Σ xq."""
        at = self._sums_at(group_size, group)
        scale_at = group if group_size == GROUP else group // 2
        return self.scales[token, scale_at], self.sums[token, at], self.steps[token, at]

    def steps_from(self, group_size: int, token: Any, group: Any, count: int) -> Any:
        """Σ xq of `count` groups of a token."""
        return self.steps[token, ramp(self._sums_at(group_size, group), count)]

    def _sums_at(self, group_size: int, group: Any) -> Any:
        return group if group_size == GROUP else self.scales.shape[1] + group


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
    prefetch_bytes: int,
) -> list[list[Any]]:
    """Emit x Wᵀ of some blocks of 16 rows and `tokens` tokens from `first` on: for each block a
    vector of rows per token.

    `blocks`: (packed weights, number of the block), all of the form that `weight` describes.
    Weights are prefetched `prefetch_bytes` ahead.
    """
    bases = [opaque(block * weight.block_bytes) for _, block in blocks]
    tile = _Tile(weight, len(blocks), x, first, tokens, unit)
    are_neighbours = len(blocks) > 1 and blocks[0][0].same_as(blocks[1][0])
    with B.serial(T.int64(weight.num_pairs)) as pair:
        read = pair * weight.pair_bytes
        starts = [B.Bind(base + read) for base in bases]
        ahead = prefetch_bytes // len(blocks)
        for (packed, _), start in zip(blocks, starts, strict=True):
            if are_neighbours:  # after the end of a block, its neighbour is read already
                skip = T.if_then_else(read + ahead >= weight.block_bytes, weight.block_bytes, 0)
                start = B.Bind(start + T.Cast("int64", skip))
            prefetch(packed, start, weight.pair_bytes, ahead)
        for half in (0, 1):
            groups = [
                PackedGroup(weight, unit, packed, start, half)
                for (packed, _), start in zip(blocks, starts, strict=True)
            ]
            tile.emit_group(groups, pair * 2 + half)
    return tile.sums()


def dot_unpacked(block: UnpackedBlock, x: Int8Activations, first: Any, tokens: int) -> list[Any]:
    """The same of one block that is unpacked already: a vector of rows per token."""
    weight = block.weight
    tile = _Tile(weight, 1, x, first, tokens, block.unit)
    tile.find_starts()
    with B.serial(T.int64(2 * weight.num_pairs)) as group:
        tile.emit_group([UnpackedGroup(block, group)], group)
    return tile.sums()[0]


def is_of_words(weight: PackedWeight, unit: ByteDot) -> bool:
    """Whether its q are multiplied as 16-bit words."""
    return weight.largest_q > unit.largest_q and unit.multiply_words is not None


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
        has_minimums = weight.format.is_affine and num_blocks == 1 and x.terms == 1
        self.is_ordered = tokens > 1 and (unit.widen is not None or has_minimums)
        self.starts: Any = None

    def find_starts(self) -> None:
        """Emit the multiplication of all sums that zero points multiply, ahead of all groups: a
        vector of groups at a time, where each group by itself costs a twentieth of the
        instructions."""
        factor = self._zero_factor
        if not factor:
            return
        count = 2 * self.weight.num_pairs
        self.starts = B.alloc_buffer((len(self.tokens) * count,), "int32", annotations=ON_THE_STACK)
        width = min(8, count)
        for i, token in enumerate(self.tokens):
            with B.serial(T.int64(-(-count // width))) as step:
                # The last step does some of the one before again.
                group = B.Bind(T.min(step * width, T.int64(count - width)))
                steps = self.x.steps_from(self.weight.group, token, group, width)
                value = steps * splat(T.int32(factor), width)
                B.buffer_store(self.starts, value, [ramp(i * count + group, width)])

    def sums(self) -> list[list[Any]]:
        count = len(self.tokens)
        vectors = [self.acc[ramp(i * LANES)] for i in range(self.num_blocks * count)]
        return [vectors[i : i + count] for i in range(0, len(vectors), count)]

    def emit_group(self, groups: Sequence[WeightGroup], group: Any) -> None:
        """Groups of the blocks, the `group`th of x."""
        weight, lanes = self.weight, self.unit.lanes
        dots = self._dots(groups, group)
        for b, of_block in enumerate(groups):
            for r, row in enumerate(self.rows):
                scale = of_block.scale(row)
                minimum = of_block.minimum(row, scale) if weight.format.is_affine else None
                for i, token in enumerate(self.tokens):
                    at = ramp((b * len(self.tokens) + i) * LANES + row, lanes)
                    x_scale, x_sum, _ = self.x.scale_and_sums(weight.group, token, group)
                    value = self.acc[at]
                    if minimum is not None:
                        value = fma(minimum, splat(x_sum, lanes), value, lanes)
                    dot = to_float(dots[i][b * len(self.rows) + r], lanes)
                    value = fma(dot, scale * splat(x_scale, lanes), value, lanes)
                    B.buffer_store(self.acc, value, [at])

    def _dots(self, groups: Sequence[WeightGroup], group: Any) -> list[list[Any]]:
        """Σ (q - zero)·xq of a group, int32, by token and register of all blocks' rows."""
        x, unit = self.x, self.unit
        x_start = group * (self.weight.group // 4)
        terms = [x_start + term * x.term_words for term in range(x.terms)]
        begins = [self._minus_zero(i, group) for i in range(len(self.tokens))]
        if is_of_words(self.weight, unit):
            return self._word_dots(groups, terms, begins)
        count = len(groups) * len(self.rows)
        all_begins = [[start] * count for start in begins]
        if x.terms == 1:
            (sums,) = self._multiply_add([all_begins], groups, terms)
            return _map(unit.total, sums, all_begins)
        zeros = [[splat(T.int32(0), unit.lanes)] * count for _ in self.tokens]

        def shifted(sums: Any) -> Any:
            return unit.shifted(sums, HIGH_BITS)

        # Two blocks, or many tokens and minimums, leave no registers for the sums of both terms.
        has_minimums = self.weight.format.is_affine and len(self.tokens) > _FEW_TOKENS
        if len(groups) == 1 and not has_minimums:
            lows, highs = self._multiply_add([all_begins, zeros], groups, terms)
            lows = _map(unit.total, lows, all_begins)
            return _map(lambda high, low: shifted(high) + low, highs, lows)
        (highs,) = self._multiply_add([zeros], groups, terms[1:])
        starts = _map(lambda high, start: shifted(high) + start, highs, all_begins)
        (lows,) = self._multiply_add([starts], groups, terms[:1])
        return _map(unit.total, lows, starts)

    def _word_dots(
        self, groups: Sequence[Any], terms: list[Any], begins: list[Any]
    ) -> list[list[Any]]:
        """The same by products of 16-bit words."""
        at = [ramp(start, self.weight.words) for start in terms]
        x_words = [[self.x.xq[token, words] for words in at] for token in self.tokens]
        parts = [
            word_dots(self.unit, self.weight, of.packed, of.q_start, x_words, begins)
            for of in groups
        ]
        return [list(itertools.chain(*of_blocks)) for of_blocks in zip(*parts, strict=True)]

    @property
    def _zero_factor(self) -> int:
        """How often Σ xq the sums of q·xq lack, with bytes of q as they come from the groups."""
        weight, unit = self.weight, self.unit
        is_less = weight.largest_q > unit.largest_q and not is_of_words(weight, unit)
        return (128 if is_less else 0) - (weight.format.zero_point or 0)

    def _minus_zero(self, i: int, group: Any) -> Any:
        """What the sums of q·xq of token number i of the tile lack, in every lane."""
        lanes = self.unit.lanes
        if self.starts is not None:
            count = 2 * self.weight.num_pairs
            return B.Bind(splat(self.starts[i * count + group], lanes))
        factor = self._zero_factor
        if not factor:
            return splat(T.int32(0), lanes)
        *_, x_sum = self.x.scale_and_sums(self.weight.group, self.tokens[i], group)
        return B.Bind(splat(x_sum * T.int32(factor), lanes))

    def _multiply_add(
        self, starts: list[list[list[Any]]], groups: Sequence[WeightGroup], x_starts: list[Any]
    ) -> list[list[list[Any]]]:
        """The sums of the unit that begin with `starts`, int32, and the products of a group's q and
        the words of x from `x_starts`: by term, token and register."""
        unit = self.unit
        sums = [[list(map(unit.before, of_token)) for of_token in of_term] for of_term in starts]
        for of_blocks in zip(*(group.words() for group in groups), strict=True):
            k = of_blocks[0][0]
            registers = list(itertools.chain(*(of_block for _, of_block in of_blocks)))
            for i, token in enumerate(self.tokens):
                for of_term, x_start in zip(sums, x_starts, strict=True):
                    word = splat(self.x.xq[token, x_start + k], unit.lanes)
                    word = B.Bind(T.reinterpret(dtype_of("int8", 4 * unit.lanes), word))
                    for r, q in enumerate(registers):
                        new = unit.multiply_add(of_term[i][r], q, word)
                        of_term[i][r] = B.Bind(unit.in_order(new) if self.is_ordered else new)
        return sums


def _map(function: Callable[[Any, Any], Any], a: Any, b: Any) -> list[list[Any]]:
    """`function` of each register of each token, bound."""
    return [
        [B.Bind(function(*both)) for both in zip(*of_token, strict=True)]
        for of_token in zip(a, b, strict=True)
    ]
