"""Activations as halves for matrix instructions, without loss of range.

    x_half[row, k] = half(x[row, k] / scale[row]),   scale[row] = a power of two

The largest of a row comes to lie between 2^14 and 2^15. So nothing is too large for a half (65504),
however large activations get, and values down to 2^-28 of the largest keep all their 11 bits.
Division by a power of two is exact: what is lost is the rounding to 11 bits alone. (bfloat16 has
the range without scales, but 8 bits.)
"""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from .kernel import (
    bind,
    body,
    kernel,
    kernel_factory,
    launch,
    registers,
    shared,
    store,
    strided,
    when,
)
from .limits import GpuLimits
from .reduce import max_lanes

_ALIGNMENT = 64
"""Rows are padded with zeros to a multiple of this: the depth of the deepest tile, so that tiles
along K have no tail."""
_TOP = 14
_EXPONENT_BIAS = 127


def padded(k: int) -> int:
    return -(-k // _ALIGNMENT) * _ALIGNMENT


@kernel_factory
def half_rows(k: int, limits: GpuLimits) -> tirx.PrimFunc:
    """x [m, k] float32 → (x_half [m, padded k] float16, scale [m] float32). A block for each row.

    Nothing is done for so few rows that `linear` does not use them.
    """
    threads = min(limits.max_threads, 256)
    with kernel(f"half_rows_{k}") as (ker, ib):
        x = ker.buffer("x", ("num_rows", k), "float32")
        out = ker.buffer("out", ("num_rows", padded(k)), "float16")
        scale = ker.buffer("scale", ("num_rows",), "float32")
        rows = ker.size("num_rows")
        with body(), when(rows > limits.gemv_rows):
            with launch([rows], [threads]) as ((row,), (thread,)):
                largest, partial = registers(1), shared(threads)
                store(largest, T.float32(0), 0)
                for i in strided(k, thread, threads):
                    store(largest, T.max(largest[0], T.fabs(x[row, i])), 0)
                store(partial, largest[0], thread)
                max_lanes(partial, [0], thread, threads)
                factor, inverse = _scale(partial[0])
                with when(thread == 0):
                    store(scale, factor, row)
                for i in strided(padded(k), thread, threads):
                    value = x[row, i]
                    if padded(k) > k:
                        value = T.if_then_else(i < k, value, T.float32(0))
                    store(out, T.Cast("float16", value * inverse), row, i)
    return ib.get()


def _scale(largest: Any) -> tuple[Any, Any]:
    """(scale, 1 / scale), put together from the exponent's bits; for rows of very small numbers
    as for 2^-112."""
    exponent = bind(T.shift_right(T.reinterpret("uint32", largest), T.uint32(23)))
    exponent = bind(T.max(exponent, T.uint32(_TOP + 1)))
    bits = exponent - T.uint32(_TOP)
    inverse_bits = T.uint32(2 * _EXPONENT_BIAS + _TOP) - exponent
    return tuple(
        bind(T.reinterpret("float32", T.shift_left(b, T.uint32(23)))) for b in (bits, inverse_bits)
    )
