"""Quantized weights times int8 activations, by an instruction set's dot products of bytes.

A step multiplies 4 consecutive k of 16 rows by 4 int8 of a token, into 16 sums; it takes one
register on AVX-512, two on AVX2, four on NEON (see `byte_dots`).
With w = q · scale + min and x = xq · xscale, a group of one row and one token adds

    scale · xscale · Σ q·xq  +  min · Σ x

to the result; a symmetric format has min = -zero_point · scale. With two terms (see `activation`)
xq stands for 254 · high + low, each with a dot product of its own.

Every number of tokens adds up in the same order, so a token's result does not depend on the batch
it is in, to the last bit.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .activation import GROUP, HIGH_STEP
from .byte_dots import ByteDot
from .control import clear
from .dot_words import word_dots
from .packing import PackedWeight
from .vectors import LANES, constant, dtype_of, local_array, opaque, ramp, splat
from .weight_vectors import load_min, load_scale, prefetch

_SUPPORTED_GROUPS = (16, 32)


@dataclass(frozen=True, slots=True)
class Int8Activations:
    """The buffers of `activation.activation_buffers`."""

    xq: Any
    scales: Any
    sums: Any
    terms: int

    @property
    def term_words(self) -> int:
        """Words of a token and a term."""
        return int(self.xq.shape[1]) // self.terms


def supports(weight: PackedWeight) -> bool:
    """Whether a weight's format has an int8 kernel."""
    return weight.is_quantized and weight.group in _SUPPORTED_GROUPS


def dot_int8(
    weight: PackedWeight,
    packed: Any,
    block: Any,
    x: Int8Activations,
    first: Any,
    tokens: int,
    unit: ByteDot,
    prefetch_bytes: int,
) -> list[Any]:
    """Emit x Wᵀ of 16 rows and `tokens` tokens from `first` on: a vector of rows per token.

    Weights are prefetched `prefetch_bytes` ahead.
    """
    acc = local_array(tokens * LANES)
    clear(acc, tokens)
    base = opaque(block * weight.block_bytes)
    first = opaque(first)
    ids = [first + i for i in range(tokens)]
    as_words = weight.largest_q > unit.largest_q and unit.multiply_words is not None
    with B.serial(T.int64(weight.num_pairs)) as pair:
        start = B.Bind(base + pair * weight.pair_bytes)
        prefetch(packed, start, weight.pair_bytes, prefetch_bytes)
        for half in (0, 1):
            group = pair * 2 + half
            q_start = start + (weight.q_offset + half * weight.q_bytes)
            x_start = group * (weight.group // 4)
            if as_words:
                starts = [x_start + term * x.term_words for term in range(x.terms)]
                x_words = [[x.xq[token, ramp(at, weight.words)] for at in starts] for token in ids]
                dots = word_dots(unit, weight, packed, q_start, x_words)
            else:
                words = _words(unit, weight, packed, q_start)
                dots = _dots(unit, weight, words, x, ids, x_start)
            for r, row in enumerate(range(0, LANES, unit.lanes)):
                scale = load_scale(weight, packed, start, half, row, unit.lanes)
                minimum = load_min(weight, packed, start, half, scale, row, unit.lanes)
                for i, token in enumerate(ids):
                    at = ramp(i * LANES + row, unit.lanes)
                    x_scale, x_sum = _scale_and_sum(weight, x, token, group)
                    partial = acc[at] + minimum * splat(x_sum, unit.lanes)
                    both = scale * splat(x_scale, unit.lanes)
                    B.buffer_store(acc, partial + dots(i, r) * both, [at])
    return [acc[ramp(i * LANES)] for i in range(tokens)]


def _words(
    unit: ByteDot, weight: PackedWeight, packed: Any, start: Any
) -> Iterator[tuple[int, list[Any]]]:
    """q of the group at byte `start`, in the order of their addresses: (first k / 4, for each
    register of rows 4 consecutive k a row). Ones above the unit's largest come as q - 128."""
    width = 4 * unit.lanes
    for j in range(weight.words):
        at = range(64 * j, 64 * (j + 1), width)
        words = [B.Bind(packed[ramp(start + byte, width)]) for byte in at]
        if weight.is_nibbles:
            four, mask = splat(T.uint8(4), width), splat(T.uint8(15), width)
            yield j, [B.Bind(T.bitwise_and(word, mask)) for word in words]
            yield j + weight.words, [B.Bind(T.shift_right(word, four)) for word in words]
        elif weight.largest_q > unit.largest_q:
            sign = splat(T.uint8(128), width)
            yield j, [B.Bind(T.bitwise_xor(word, sign)) for word in words]
        else:
            yield j, words


def _dots(
    unit: ByteDot,
    weight: PackedWeight,
    words: Iterable[tuple[int, list[Any]]],
    x: Int8Activations,
    tokens: list[Any],
    start: Any,
) -> Callable[[int, int], Any]:
    """Σ q·xq of a group, all terms, as float32 (exact), by token and register of rows.

    `start` is the group's first word of x.
    """
    pairs = [
        (i, term, token, start + term * x.term_words)
        for i, token in enumerate(tokens)
        for term in range(x.terms)
    ]
    sums: dict[tuple[int, int], list[Any]] = {}
    for i, term, token, at in pairs:
        is_offset = weight.largest_q > unit.largest_q
        begin = _sum_times_128(unit, weight, x, token, at) if is_offset else unit.zero
        sums[i, term] = [begin] * (LANES // unit.lanes)
    for k, registers in words:
        for i, term, token, at in pairs:
            word = splat(x.xq[token, at + k], unit.lanes)
            word = B.Bind(T.reinterpret(dtype_of("int8", 4 * unit.lanes), word))
            for r, q in enumerate(registers):
                sums[i, term][r] = B.Bind(unit.multiply_add(sums[i, term][r], q, word))

    def total(i: int, term: int, r: int) -> Any:
        return T.Cast(dtype_of("float32", unit.lanes), unit.total(sums[i, term][r]))

    def dot(i: int, r: int) -> Any:
        if x.terms == 1:
            return total(i, 0, r)
        return total(i, 1, r) * constant(HIGH_STEP, unit.lanes) + total(i, 0, r)

    return dot


def _sum_times_128(
    unit: ByteDot, weight: PackedWeight, x: Int8Activations, token: Any, start: Any
) -> Any:
    """128 · Σ xq of a group and a term in every lane: what the products with q - 128 lack."""
    width = 4 * unit.lanes
    sums = unit.zero
    for k in range(0, weight.group // 4, unit.lanes):
        word = T.reinterpret(dtype_of("int8", width), x.xq[token, ramp(start + k, unit.lanes)])
        sums = unit.multiply_add(sums, splat(T.uint8(64), width), word)
    total = T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", sums)
    return B.Bind(splat(total * T.int32(2), unit.lanes))


def _scale_and_sum(
    weight: PackedWeight, x: Int8Activations, token: Any, group: Any
) -> tuple[Any, Any]:
    if weight.group == GROUP:
        return x.scales[token, group], x.sums[token, group]
    return x.scales[token, group // 2], x.sums[token, x.scales.shape[1] + group]
