"""What the kernels want to know of a CPU's vector instructions."""

from dataclasses import dataclass

from tvm.target import Target
from tvm.target.codegen import llvm_get_cpu_features

from .vectors import LANES

_VNNI512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"})


@dataclass(frozen=True, slots=True)
class CpuIsa:
    """Vector registers of a CPU: how many, how many float32 lanes wide, and what they can do.

    Kernels are written in vectors of 16 float32; one takes `16 / lanes` registers.
    """

    name: str
    lanes: int
    num_registers: int
    has_vnni512: bool = False

    @property
    def token_tiles(self) -> tuple[int, ...]:
        """Tokens worked on together, largest first: each keeps one vector of 16 sums in registers.

        The largest leaves room for two more vectors; the rest are the powers of two below it.
        """
        per_vector = LANES // self.lanes
        largest = min(8, self.num_registers // per_vector - 2)
        return (largest, *(t for t in (8, 4, 2, 1) if t < largest))

    @property
    def chains(self) -> int:
        """Sums that the dot products of floats and quantized weights are split into, to hide the
        latency of one: two, where a full tile leaves registers for them."""
        per_vector = LANES // self.lanes
        return 2 if 2 * self.token_tiles[0] * per_vector < self.num_registers else 1


def isa_of(target: Target) -> CpuIsa:
    """The instruction set of an `llvm` target, from its LLVM features (`mcpu`, `mattr`)."""
    features = {str(feature) for feature in llvm_get_cpu_features(target)}
    if "avx512f" in features:
        return CpuIsa("avx512", 16, 32, has_vnni512=features >= _VNNI512)
    if {"avx2", "fma"} <= features:
        return CpuIsa("avx2", 8, 16)
    if "neon" in features:
        return CpuIsa("neon", 4, 32)
    return CpuIsa("generic", 4, 16)
