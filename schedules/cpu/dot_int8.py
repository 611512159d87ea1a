"""Quantized weights times int8 activations, by AVX-512 VNNI.

One `vpdpbusd` multiplies 4 consecutive k of 16 rows by 4 int8 of a token, into 16 int32 sums.
With w = q · scale + min and x = xq · xscale, a group of one row and one token adds

    scale · xscale · Σ q·xq  +  min · Σ x

to the result; a symmetric format has min = -zero_point · scale. With two terms (see `activation`)
xq stands for 254 · high + low, each with a dot product of its own.

Every number of tokens adds up in the same order, so a token's result does not depend on the batch
it is in, to the last bit.
"""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .activation import GROUP, HIGH_STEP
from .control import clear
from .packing import PackedWeight
from .vectors import LANES, local_array, ramp, splat
from .weight_vectors import load_min, load_scale, prefetch

_SUPPORTED_GROUPS = (16, 32)


@dataclass(frozen=True, slots=True)
class Int8Activations:
    """The buffers of `activation.activation_buffers`."""

    xq: Any
    scales: Any
    sums: Any
    terms: int


def supports(weight: PackedWeight) -> bool:
    """Whether a weight's format has an int8 kernel."""
    return weight.is_quantized and weight.group in _SUPPORTED_GROUPS


def dot_int8(
    weight: PackedWeight, packed: Any, block: Any, x: Int8Activations, first: Any, tokens: int
) -> list[Any]:
    """Emit x Wᵀ of 16 rows and `tokens` tokens from `first` on: a vector of rows per token."""
    acc = local_array(tokens * LANES)
    clear(acc, tokens)
    base = B.Bind(block * weight.block_bytes)
    with B.serial(T.int64(weight.num_pairs)) as pair:
        start = B.Bind(base + pair * weight.pair_bytes)
        if tokens > 1:
            prefetch(packed, start, weight.pair_bytes)
        for half in (0, 1):
            group = pair * 2 + half
            scale = load_scale(weight, packed, start, half)
            minimum = load_min(weight, packed, start, half, scale)
            words = _load_words(weight, packed, start + weight.q_offset + half * weight.q_bytes)
            for i in range(tokens):
                at = ramp(i * LANES)
                dot = _dot_terms(words, x, first + i, group * (weight.group // 4))
                x_scale, x_sum = _scale_and_sum(weight, x, first + i, group)
                partial = acc[at] + minimum * splat(x_sum)
                B.buffer_store(acc, partial + dot * (scale * splat(x_scale)), [at])
    return [acc[ramp(i * LANES)] for i in range(tokens)]


def _dot_terms(words: list[tuple[int, Any]], x: Int8Activations, token: Any, start: Any) -> Any:
    """Σ q·xq of a group, all terms, as float32 (exact: the sums fit 24 bits)."""
    low = T.Cast("float32x16", _dot_words(words, x.xq, token, start))
    if x.terms == 1:
        return low
    offset = int(x.xq.shape[1]) // 2
    high = T.Cast("float32x16", _dot_words(words, x.xq, token, start + offset))
    return high * splat(T.float32(HIGH_STEP)) + low


def _load_words(weight: PackedWeight, packed: Any, start: Any) -> list[tuple[int, Any]]:
    """q of one group of 16 rows: (first k / 4, vector of 4 consecutive k a row, a byte each).

    In the order of their addresses.
    """
    vectors = [B.Bind(packed[ramp(start + 64 * j, 64)]) for j in range(weight.words)]
    if not weight.is_nibbles:
        return list(enumerate(vectors))
    mask = splat(T.uint8(15), 64)
    words = []
    for j, v in enumerate(vectors):
        words.append((j, B.Bind(T.bitwise_and(v, mask))))
        # There is no shift of bytes: shift words, mask away what came from the neighbour.
        shifted = T.shift_right(T.reinterpret("uint32x16", v), splat(T.uint32(4)))
        high = B.Bind(T.bitwise_and(T.reinterpret("uint8x64", shifted), mask))
        words.append((j + weight.words, high))
    return words


def _dot_words(words: list[tuple[int, Any]], xq: Any, token: Any, start: Any) -> Any:
    """Σ q·xq of a group and a term.

    One chain: other groups and tokens hide its latency, and with two LLVM loads the words of a
    single token out of order.
    """
    acc: Any = splat(T.int32(0))
    for offset, word in words:
        acc = _vpdpbusd(acc, word, xq[token, start + offset])
    return acc


def _vpdpbusd(acc: Any, q: Any, x: Any) -> Any:
    x = T.reinterpret("int8x64", splat(x))
    return T.call_llvm_pure_intrin("int32x16", "llvm.x86.avx512.vpdpbusd.512", acc, q, x)


def _scale_and_sum(
    weight: PackedWeight, x: Int8Activations, token: Any, group: Any
) -> tuple[Any, Any]:
    if weight.group == GROUP:
        return x.scales[token, group], x.sums[token, group]
    return x.scales[token, group // 2], x.sums[token, x.scales.shape[1] + group]
