"""Weights of bfloat16 times activations of bfloat16, by AVX-512's dot products.

An instruction multiplies two consecutive k of 16 rows (a register) by those of a token and adds
both products to 16 float32. With two terms (see `activation_bf16`) a token has two such pairs.
Denormal numbers count as zero.

Sums are split in two, by term or else by even and odd pairs, to hide the latency of one. Every
number of tokens adds up in the same order, so a token's result does not depend on the batch it is
in, to the last bit.
"""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .activation_bf16 import LINE, PAIRS
from .control import clear
from .packing import PackedWeight
from .vectors import LANES, local_array, opaque, ramp, splat
from .weight_vectors import prefetch

_CHAINS = 2
_UNROLL = 2
LLVM_SOURCE = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)

define <16 x float> @everycast_dot_bf16(<16 x float> %sums, <16 x i32> %w, <16 x i32> %x) {
  %a = bitcast <16 x i32> %w to <32 x bfloat>
  %b = bitcast <16 x i32> %x to <32 x bfloat>
  %new = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> %sums, <32 x bfloat> %a, <32 x bfloat> %b)
  ret <16 x float> %new
}
"""
"""LLVM IR that a kernel with `dot_bf16` imports: TVM widens operands of bfloat16 to float32."""


@dataclass(frozen=True, slots=True)
class Bf16Activations:
    """The buffer of `activation_bf16.bf16_activation_buffer`."""

    words: Any
    terms: int


def dot_bf16(
    weight: PackedWeight,
    packed: Any,
    block: Any,
    x: Bf16Activations,
    first: Any,
    tokens: int,
    prefetch_bytes: int,
) -> list[Any]:
    """Emit x Wᵀ of 16 rows and `tokens` tokens from `first` on: a vector of rows per token.

    Weights are prefetched `prefetch_bytes` ahead.
    """
    acc = local_array(_CHAINS * tokens * LANES)
    clear(acc, _CHAINS * tokens)
    base = opaque(block * weight.block_bytes)
    first = opaque(first)
    pair_bytes = 2 * weight.vector_bytes

    def emit(line: Any, pair: Any, parity: int) -> None:
        data = packed[ramp(base + (line * PAIRS + pair) * pair_bytes, pair_bytes)]
        w = B.Bind(T.reinterpret("int32x16", data))
        for i in range(tokens):
            for term in range(x.terms):
                word = x.words[first + i, (line * x.terms + term) * PAIRS + pair]
                chain = term if x.terms == _CHAINS else parity
                at = ramp((chain * tokens + i) * LANES)
                new = T.call_extern("float32x16", "everycast_dot_bf16", acc[at], w, splat(word))
                B.buffer_store(acc, new, [at])

    whole, rest = divmod(weight.k, LINE)
    with B.serial(T.int64(whole)) as line:
        line_bytes = PAIRS * pair_bytes
        prefetch(packed, base + line * line_bytes, line_bytes, prefetch_bytes)
        with B.serial(T.int64(PAIRS // _UNROLL)) as step:
            for parity in range(_UNROLL):
                emit(line, step * _UNROLL + parity, parity)
    for pair in range(-(-rest // 2)):
        emit(T.int64(whole), pair, pair % _UNROLL)
    return [acc[ramp(i * LANES)] + acc[ramp((tokens + i) * LANES)] for i in range(tokens)]
