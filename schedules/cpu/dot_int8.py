"""Quantized weights times int8 activations, by AVX-512 VNNI.

One `vpdpbusd` multiplies 4 consecutive k of 16 rows by 4 int8 of a token, into 16 int32 sums.
With w = q · scale + min and x = xq · xscale, a group of one row and one token adds

    scale · xscale · Σ q·xq  +  min · Σ x

to the result; a symmetric format has min = -zero_point · scale.
"""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .activation import GROUP
from .control import clear
from .packing import PackedWeight
from .vectors import LANES, ramp, splat
from .weight_vectors import load_min, load_scale, prefetch

_SUPPORTED_GROUPS = (16, 32)


@dataclass(frozen=True, slots=True)
class Int8Activations:
    """The buffers of `activation.activation_buffers`."""

    xq: Any
    scales: Any
    sums: Any


def supports(weight: PackedWeight) -> bool:
    """Whether a weight's format has an int8 kernel."""
    return weight.is_quantized and weight.group in _SUPPORTED_GROUPS


def dot_int8(
    weight: PackedWeight, packed: Any, block: Any, x: Int8Activations, first: Any, tokens: int
) -> list[Any]:
    """Emit x Wᵀ of 16 rows and `tokens` tokens from `first` on: a vector of rows per token."""
    chains = 2 if tokens <= 2 else 1
    acc = B.alloc_buffer((tokens * chains * LANES,), "float32", scope="local")
    clear(acc, tokens * chains)
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
                at = ramp((i * chains + half % chains) * LANES)
                xq_at = group * (weight.group // 4)
                dot = _dot_words(words, x.xq, first + i, xq_at)
                x_scale, x_sum = _scale_and_sum(weight, x, first + i, group)
                partial = acc[at] + minimum * splat(x_sum)
                dot = T.Cast("float32x16", dot)
                B.buffer_store(acc, partial + dot * (scale * splat(x_scale)), [at])
    return [_sum_chains(acc, i, chains) for i in range(tokens)]


def _sum_chains(acc: Any, token: int, chains: int) -> Any:
    vectors = [acc[ramp((token * chains + c) * LANES)] for c in range(chains)]
    return vectors[0] + vectors[1] if chains == 2 else vectors[0]


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
    """Σ q·xq of a group.

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
