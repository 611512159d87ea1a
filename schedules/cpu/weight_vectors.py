"""Reading vectors of 16 rows out of a packed weight."""

from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .packing import DTYPE_BYTES, PackedWeight
from .vectors import LANES, dtype_of, ramp, splat


def prefetch(packed: Any, at: Any, num_bytes: int, distance: Any) -> None:
    """Bring `num_bytes` that lie `distance` bytes behind byte `at` into the L1 cache; nothing with
    the int 0. For tiles of several tokens.

    Those compute long enough between loads to need it (1.3 to 2.5 times faster), and as they read
    x in several streams the hardware's prefetcher is of no use to them. From the L2 cache alone a
    line would be waited for once more. A single token waits for memory alone, and requests of ours
    get in the way of the hardware's prefetcher (25 to 40 % slower).
    """
    if isinstance(distance, int) and not distance:
        return
    start = at + distance
    for line in range(0, num_bytes, 64):
        prefetch_line(T.address_of(packed[start + line]))


def prefetch_line(address: Any) -> None:
    """Bring what lies at an address into the L1 cache."""
    read, to_l1, data = T.int32(0), T.int32(3), T.int32(1)
    B.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", address, read, to_l1, data))


def load_float(packed: Any, at: Any, dtype: str, width: int = LANES) -> Any:
    """`width` values of dtype `dtype` at byte offset `at`, as float32."""
    size = DTYPE_BYTES[dtype]
    data = packed[ramp(at, width * size)]
    if dtype == "float32":
        return T.reinterpret(dtype_of("float32", width), data)
    if dtype == "float16":
        half = T.reinterpret(dtype_of("float16", width), data)
        return T.Cast(dtype_of("float32", width), half)
    bits = T.Cast(dtype_of("uint32", width), T.reinterpret(dtype_of("uint16", width), data))
    bits = T.shift_left(bits, splat(T.uint32(16), width))
    return T.reinterpret(dtype_of("float32", width), bits)


def load_pair(packed: Any, at: Any) -> tuple[Any, Any]:
    """The pairs of k of 16 rows of a bfloat16 weight at byte offset `at`, as float32."""
    bits = B.Bind(T.reinterpret("uint32x16", packed[ramp(at, 4 * LANES)]))
    even = T.shift_left(bits, splat(T.uint32(16)))
    odd = T.bitwise_and(bits, splat(T.uint32(0xFFFF0000)))
    return T.reinterpret("float32x16", even), T.reinterpret("float32x16", odd)


def load_scale(
    weight: PackedWeight, packed: Any, start: Any, half: int, row: Any = 0, width: int = LANES
) -> Any:
    """The bound scales of `width` rows from `row` on, in group `half` of the pair at `start`."""
    return B.Bind(_load_rows(weight, packed, start, half, row, width))


def load_min(
    weight: PackedWeight,
    packed: Any,
    start: Any,
    half: int,
    scale: Any,
    row: Any = 0,
    width: int = LANES,
) -> Any:
    """The bound minimums (what q = 0 stands for) of the same, given the scales."""
    if weight.format.zero_point is None:
        return B.Bind(_load_rows(weight, packed, start, 2 + half, row, width))
    return B.Bind(scale * splat(T.float32(-weight.format.zero_point), width))


def _load_rows(
    weight: PackedWeight, packed: Any, start: Any, vector: int, row: Any, width: int
) -> Any:
    at = vector * weight.vector_bytes + row * DTYPE_BYTES[weight.format.dtype]
    return load_float(packed, start + at, weight.format.dtype, width)
