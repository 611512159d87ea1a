"""What the kernels want to know of a CPU's vector instructions."""

from dataclasses import dataclass

from tvm.target import Target
from tvm.target.codegen import llvm_get_cpu_features

from .vectors import LANES


@dataclass(frozen=True, slots=True)
class CpuIsa:
    """Vector registers of a CPU: how many, how many float32 lanes wide, and what they can do.

    Kernels are written in vectors of 16 float32; one takes `16 / lanes` registers.
    """

    name: str
    lanes: int
    num_registers: int
    byte_dot: str | None = None
    """Key of `byte_dots.BYTE_DOTS`; None where dot products of bytes are slow."""
    has_bf16_dot: bool = False
    """Dot products of bfloat16 with AVX-512's instruction (see `dot_bf16`)."""

    def largest_tile(self, terms: int) -> int:
        """Tokens worked on together, unless tuning found better: each keeps 16 sums, for each of
        `terms` that are summed at once, or of float32 (`terms` 0), in registers.

        That leaves room for two more vectors of floats; sums of terms take half of the registers,
        the rest is for weights.
        """
        vectors = self.num_registers * self.lanes // LANES
        return min(8, vectors // (2 * terms) if terms else vectors - 2)

    num_word_pairs: int = 0
    """Of the 4 pairs of words of a group of 4-bit weights, how many are multiplied as products of
    sums, where many tokens are (see `dot_many`): best where multiplications and additions keep all
    pipes busy."""

    @property
    def pair_tile(self) -> int:
        """Tokens of a tile of two blocks of rows, for terms of int8; 0: none.

        Each word of x that it loads is multiplied twice: where a register holds 16 rows, loads are
        as scarce as multiplications. There is no register for a fifth token.
        """
        return 4 if self.lanes == LANES and not self.many_tokens else 0

    @property
    def many_tokens(self) -> int:
        """Tokens from which on weights stay in registers and tokens pass by (see `dot_many`), for
        terms of int8; 0: never.

        It takes registers for two blocks of rows of a group, beside what an instruction that
        multiplies and adds needs.
        """
        return 16 if self.byte_dot == "avx512vnni" else 0

    @property
    def unpack_tokens(self) -> int:
        """Tokens from which on unpacking weights of 4 bits once for all pays, for terms of int8; 0:
        never.

        It does where tiles are small and products and sums take two instructions, which leave no
        room beside them for unpacking.
        """
        return 4 * self.largest_tile(1) if self.byte_dot == "avx2" else 0

    @property
    def chains(self) -> int:
        """Sums that the dot products of floats and quantized weights are split into, to hide the
        latency of one: two, where a full tile leaves registers for them."""
        per_vector = LANES // self.lanes
        return 2 if 2 * self.largest_tile(0) * per_vector < self.num_registers else 1


def isa_of(target: Target) -> CpuIsa:
    """The instruction set of an `llvm` target, from its LLVM features (`mcpu`, `mattr`)."""
    features = {str(feature) for feature in llvm_get_cpu_features(target)}

    def isa(name: str, lanes: int, num_registers: int, *byte_dots: str) -> CpuIsa:
        byte_dot = next((name for name in byte_dots if name in features), None)
        has_bf16_dot = name == "avx512" and "avx512bf16" in features
        # Four pipes add, two multiply; of others nobody has measured it.
        num_word_pairs = 3 if target.attrs.get("mcpu") == "znver5" else 0
        return CpuIsa(name, lanes, num_registers, byte_dot, has_bf16_dot, num_word_pairs)

    if {"avx512f", "avx512vl"} <= features:
        return isa("avx512", 16, 32, "avx512vnni", "avx512bw")
    if {"avx2", "fma"} <= features:
        return isa("avx2", 8, 16, "avxvnni", "avx2")
    if "neon" in features:
        return isa("neon", 4, 32, "i8mm", "dotprod")
    return isa("generic", 4, 16)
