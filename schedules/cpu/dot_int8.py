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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .activation import GROUP, HIGH_BITS
from .byte_dots import ByteDot
from .control import clear
from .dot_words import word_dots
from .packing import PackedWeight
from .vectors import LANES, dtype_of, fma, local_array, opaque, ramp, splat, to_float
from .weight_vectors import load_min, load_scale, prefetch

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
        at, scale_at = group, group
        if group_size != GROUP:
            at, scale_at = self.scales.shape[1] + group, group // 2
        return self.scales[token, scale_at], self.sums[token, at], self.steps[token, at]


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
    tile = _Tile(weight, blocks, x, first, tokens, unit)
    are_neighbours = len(blocks) > 1 and blocks[0][0].same_as(blocks[1][0])
    with B.serial(T.int64(weight.num_pairs)) as pair:
        read = pair * weight.pair_bytes
        starts = [B.Bind(base + read) for base in tile.bases]
        ahead = prefetch_bytes // len(blocks)
        for (packed, _), start in zip(blocks, starts, strict=True):
            if are_neighbours:  # after the end of a block, its neighbour is read already
                skip = T.if_then_else(read + ahead >= weight.block_bytes, weight.block_bytes, 0)
                start = B.Bind(start + T.Cast("int64", skip))
            prefetch(packed, start, weight.pair_bytes, ahead)
        for half in (0, 1):
            tile.emit_group(starts, half, pair * 2 + half)
    return tile.sums()


class _Tile:
    """The sums of a tile, and how a group is added to them."""

    def __init__(
        self,
        weight: PackedWeight,
        blocks: Sequence[tuple[Any, Any]],
        x: Int8Activations,
        first: Any,
        tokens: int,
        unit: ByteDot,
    ) -> None:
        self.weight, self.x, self.unit = weight, x, unit
        self.packed = [packed for packed, _ in blocks]
        self.acc = local_array(len(blocks) * tokens * LANES)
        clear(self.acc, len(blocks) * tokens)
        self.bases = [opaque(block * weight.block_bytes) for _, block in blocks]
        first = opaque(first)
        self.tokens = [first + i for i in range(tokens)]
        self.rows = range(0, LANES, unit.lanes)
        """First rows of the registers of a block."""

    def sums(self) -> list[list[Any]]:
        count = len(self.tokens)
        vectors = [self.acc[ramp(i * LANES)] for i in range(len(self.packed) * count)]
        return [vectors[i : i + count] for i in range(0, len(vectors), count)]

    def emit_group(self, starts: list[Any], half: int, group: Any) -> None:
        """Group `half` of the pairs at bytes `starts` of the blocks, the `group`th of x."""
        weight, lanes = self.weight, self.unit.lanes
        dots = self._dots(starts, half, group)
        for b, (packed, start) in enumerate(zip(self.packed, starts, strict=True)):
            for r, row in enumerate(self.rows):
                scale = load_scale(weight, packed, start, half, row, lanes)
                minimum = None
                if weight.format.is_affine:
                    minimum = load_min(weight, packed, start, half, scale, row, lanes)
                for i, token in enumerate(self.tokens):
                    at = ramp((b * len(self.tokens) + i) * LANES + row, lanes)
                    x_scale, x_sum, _ = self.x.scale_and_sums(weight.group, token, group)
                    value = self.acc[at]
                    if minimum is not None:
                        value = fma(minimum, splat(x_sum, lanes), value, lanes)
                    dot = to_float(dots[i][b * len(self.rows) + r], lanes)
                    value = fma(dot, scale * splat(x_scale, lanes), value, lanes)
                    B.buffer_store(self.acc, value, [at])

    def _dots(self, starts: list[Any], half: int, group: Any) -> list[list[Any]]:
        """Σ (q - zero)·xq of a group, int32, by token and register of all blocks' rows."""
        weight, x, unit = self.weight, self.x, self.unit
        q_starts = [start + (weight.q_offset + half * weight.q_bytes) for start in starts]
        x_start = group * (weight.group // 4)
        terms = [x_start + term * x.term_words for term in range(x.terms)]
        if weight.largest_q > unit.largest_q and unit.multiply_words is not None:
            begins = [self._minus_zero(token, group, 0) for token in self.tokens]
            x_words = [
                [x.xq[token, ramp(at, weight.words)] for at in terms] for token in self.tokens
            ]
            parts = [
                word_dots(unit, weight, packed, q_start, x_words, begins)
                for packed, q_start in zip(self.packed, q_starts, strict=True)
            ]
            return [list(itertools.chain(*of_blocks)) for of_blocks in zip(*parts, strict=True)]
        offset = 128 if weight.largest_q > unit.largest_q else 0
        count = len(self.packed) * len(self.rows)
        begins = [[self._minus_zero(token, group, offset)] * count for token in self.tokens]
        if x.terms == 1:
            return self._multiply_add([begins], q_starts, terms)[0]
        zero, shift = (splat(T.int32(value), unit.lanes) for value in (0, HIGH_BITS))
        zeros = [[zero] * count for _ in self.tokens]

        def joined(highs: list[list[Any]], lows: list[list[Any]]) -> list[list[Any]]:
            return [
                [B.Bind(T.shift_left(high, shift) + low) for high, low in zip(*both, strict=True)]
                for both in zip(highs, lows, strict=True)
            ]

        # Two blocks, or many tokens and minimums, leave no registers for the sums of both terms.
        has_minimums = weight.format.is_affine and len(self.tokens) > _FEW_TOKENS
        if len(self.packed) == 1 and not has_minimums:
            lows, highs = self._multiply_add([begins, zeros], q_starts, terms)
            return joined(highs, lows)
        (highs,) = self._multiply_add([zeros], q_starts, terms[1:])
        return self._multiply_add([joined(highs, begins)], q_starts, terms[:1])[0]

    def _minus_zero(self, token: Any, group: Any, offset: int) -> Any:
        """What the sums of q·xq lack, in every lane, if bytes stand for `offset` more."""
        factor = offset - (self.weight.format.zero_point or 0)
        if not factor:
            return splat(T.int32(0), self.unit.lanes)
        *_, x_sum = self.x.scale_and_sums(self.weight.group, token, group)
        return B.Bind(splat(x_sum * T.int32(factor), self.unit.lanes))

    def _multiply_add(
        self, sums: list[list[list[Any]]], q_starts: list[Any], x_starts: list[Any]
    ) -> list[list[list[Any]]]:
        """The sums, int32, with the products of a group's q and the words of x from `x_starts`: by
        term, token and register."""
        unit = self.unit
        totals = [[list(map(unit.before, of_token)) for of_token in of_term] for of_term in sums]
        for k, registers in self._words(q_starts):
            for i, token in enumerate(self.tokens):
                for of_term, x_start in zip(totals, x_starts, strict=True):
                    word = splat(self.x.xq[token, x_start + k], unit.lanes)
                    word = B.Bind(T.reinterpret(dtype_of("int8", 4 * unit.lanes), word))
                    for r, q in enumerate(registers):
                        of_term[i][r] = B.Bind(unit.multiply_add(of_term[i][r], q, word))
        return [
            [list(map(unit.total, *both)) for both in zip(*of_terms, strict=True)]
            for of_terms in zip(totals, sums, strict=True)
        ]

    def _words(self, q_starts: list[Any]) -> Iterator[tuple[int, list[Any]]]:
        """q of the group at bytes `q_starts`, in the order of their addresses: (first k / 4, for
        each register of rows 4 consecutive k a row). Ones above the unit's largest come as q - 128.
        """
        weight, unit = self.weight, self.unit
        width = 4 * unit.lanes
        for j in range(weight.words):
            words = [
                B.Bind(packed[ramp(start + byte, width)])
                for packed, start in zip(self.packed, q_starts, strict=True)
                for byte in range(64 * j, 64 * (j + 1), width)
            ]
            if weight.is_nibbles:
                four, mask = splat(T.uint8(4), width), splat(T.uint8(15), width)
                yield j, [B.Bind(T.bitwise_and(word, mask)) for word in words]
                yield j + weight.words, [B.Bind(T.shift_right(word, four)) for word in words]
            elif weight.largest_q > unit.largest_q:
                sign = splat(T.uint8(128), width)
                yield j, [B.Bind(T.bitwise_xor(word, sign)) for word in words]
            else:
                yield j, words
