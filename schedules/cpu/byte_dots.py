"""What instruction sets offer for sums of products of bytes, for the one algorithm of `dot_int8`.

Each multiplies bytes of weights (q, unsigned) by bytes of activations (x, signed) and adds
neighbours up, without ever saturating: the sums are the same integers on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from .vectors import dtype_of, splat

_IN_ORDER = "everycast_in_order"


@dataclass(frozen=True, slots=True)
class ByteDot:
    """One instruction set's way from bytes to int32 sums, a register of rows at a time.

    `multiply_add(sums, q, x)` adds the products of 4 consecutive k of `lanes` rows, q uint8 and x
    int8 of 4 · lanes bytes; `widen(sums)` makes int32 of them, a lane a row, None where they are
    int32 already. Sums are of `sum_dtype` and may hold the products
    of 32 k. q must not exceed `largest_q`. Larger ones are multiplied as 16-bit words by
    `multiply_words(q, x)`, which adds 2 neighbours up to int32; where there is none, bytes of q are
    signed and stand for 128 more (see `dot_int8`).
    """

    lanes: int
    largest_q: int
    sum_dtype: str
    multiply_add: Callable[[Any, Any, Any], Any]
    widen: Callable[[Any], Any] | None = None
    multiply_words: Callable[[Any, Any], Any] | None = None
    llvm_source: str = ""
    """LLVM IR that kernels with these sums import, for `in_order`."""

    def before(self, start: Any) -> Any:
        """Sums before the first step, which `total` makes `start` of, an int32 vector."""
        if self.widen is None:
            return start
        dtype, _, width = self.sum_dtype.partition("x")
        return splat(tirx.const(0, dtype), int(width))

    def in_order(self, sums: Any) -> Any:
        """The same sums, before which LLVM adds up no later ones (where there is LLVM IR for it).

        Left to itself it adds up all products of a token at once, or takes the tokens of a tile one
        after another: either way it keeps more vectors than there are registers.
        """
        return T.call_extern(self.sum_dtype, _IN_ORDER, sums) if self.llvm_source else sums

    def total(self, sums: Any, start: Any) -> Any:
        """`start` and all products, int32."""
        return sums if self.widen is None else self.widen(sums) + start


def _by_instruction(dtype: str, name: str, q_dtype: str = "uint8") -> ByteDot:
    """One that multiplies, adds 4 neighbours, and adds that to int32 sums, all at once."""
    lanes = int(dtype.partition("x")[2])
    q_type = dtype_of(q_dtype, 4 * lanes)

    def multiply_add(sums: Any, q: Any, x: Any) -> Any:
        q = q if q_dtype == "uint8" else T.reinterpret(q_type, q)
        return T.call_llvm_pure_intrin(dtype, name, sums, q, x)

    largest_q = 255 if q_dtype == "uint8" else 127
    source = _in_order_source(f"<{lanes} x i32>") if ".x86." in name else ""
    return ByteDot(lanes, largest_q, dtype, multiply_add, llvm_source=source)


def _by_pairs(lanes: int, multiply: str, add_pairs: str) -> ByteDot:
    """Sums of pairs as int16, which have room for 16 of at most 2 · 15 · 128 each."""
    sum_dtype = dtype_of("int16", 2 * lanes)

    def multiply_add(sums: Any, q: Any, x: Any) -> Any:
        return sums + T.call_llvm_pure_intrin(sum_dtype, multiply, q, x)

    def multiply_words(q: Any, x: Any) -> Any:
        return T.call_llvm_pure_intrin(dtype_of("int32", lanes), add_pairs, q, x)

    def widen(sums: Any) -> Any:
        return multiply_words(sums, splat(T.int16(1), 2 * lanes))

    source = _in_order_source(f"<{2 * lanes} x i16>")
    return ByteDot(lanes, 15, sum_dtype, multiply_add, widen, multiply_words, source)


def _in_order_source(vector: str) -> str:
    """An empty instruction that seems to change an x86 vector register, in its place among others
    of its kind."""
    return f"""
define {vector} @{_IN_ORDER}({vector} %sums) alwaysinline {{
  %same = call {vector} asm sideeffect "", "=v,0"({vector} %sums)
  ret {vector} %same
}}
"""


BYTE_DOTS = {
    "avx512vnni": _by_instruction("int32x16", "llvm.x86.avx512.vpdpbusd.512"),
    "avx512bw": _by_pairs(16, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    # The same name with either encoding, that of AVX-512 VL or of AVX-VNNI.
    "avxvnni": _by_instruction("int32x8", "llvm.x86.avx512.vpdpbusd.256"),
    "avx2": _by_pairs(8, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    "i8mm": _by_instruction("int32x4", "llvm.aarch64.neon.usdot"),
    "dotprod": _by_instruction("int32x4", "llvm.aarch64.neon.sdot", "int8"),
}
"""By the LLVM feature that brings them, best first for each kind of processor."""
