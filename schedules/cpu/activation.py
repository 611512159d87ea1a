"""Activations as int8 in groups of 32, for the integer dot products of `dot_int8`.

One term:   x ≈ xq · scale,                xq in [-127, 127],         scale = max |x| / 127
Two terms:  x ≈ (254 · high + low) · scale, both in [-127, 127],      scale = max |x| / 32384

One is the usual W4A8. Two cost a second pass of dot products, which decoding hides behind the
weights' memory traffic, and are as exact as float32 activations for all practical purposes.

The sums of x over groups of 32, and of 16, come with them: minimums and zero points of weights
multiply sums, not elements.
"""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows
from .kernel import body, kernel, kernel_factory
from .vectors import LANES, constant, local_array, ramp, splat

GROUP = 32
HIGH_STEP = 254
"""What one step of the high term is worth."""
_TWO_TERM_STEPS = 127 * HIGH_STEP + 126  # one more would round the high term to 128
_TINY = 1e-30


def padded_k(k: int) -> int:
    """K as the int8 kernels read it: whole pairs of groups."""
    return -(-k // (2 * GROUP)) * 2 * GROUP


def activation_buffers(k: int, m: Any, terms: int) -> list[tuple[tuple[Any, int], str]]:
    """Shapes and dtypes of `quantize_activations`' outputs for m tokens (a number or symbolic).

    xq [m, terms · K/4] int32 (4 int8 a word; all of the low term, then all of the high one),
    scales [m, K/32], sums [m, K/32 + K/16]; K is padded.
    """
    groups = padded_k(k) // GROUP
    return [
        ((m, terms * groups * 8), "int32"),
        ((m, groups), "float32"),
        ((m, groups * 3), "float32"),
    ]


@kernel_factory
def quantize_activations(k: int, terms: int) -> tirx.PrimFunc:
    """x [m, K] float32 → the three buffers of `activation_buffers`."""
    with kernel(f"quantize_activations_{k}_int{8 * terms}") as (func, ib):
        x = func.buffer("x", ("num_tokens", k), "float32")
        xq, scales, sums = (
            func.buffer(name, shape, dtype)
            for name, (shape, dtype) in zip(
                ("xq", "scales", "sums"), activation_buffers(k, "num_tokens", terms), strict=True
            )
        )

        def emit(row: Any) -> None:
            with B.serial(T.int64(k // GROUP)) as group:
                at = group * GROUP
                low, high = x[row, ramp(at)], x[row, ramp(at + LANES)]
                quantize_group(xq, scales, sums, row, group, B.Bind(low), B.Bind(high))
            for group in range(k // GROUP, padded_k(k) // GROUP):
                low, high = _tail(x, row, group * GROUP, k)
                quantize_group(xq, scales, sums, row, T.int64(group), low, high)

        with body():
            for_rows(func.size("num_tokens"), k, emit)
    return ib.get()


def quantize_group(
    xq: Any, scales: Any, sums: Any, row: Any, group: Any, low: Any, high: Any
) -> None:
    """Emit the rounding of one group, given as two bound vectors, into the three buffers."""
    num_groups = scales.shape[1]
    is_two_terms = int(xq.shape[1]) != int(num_groups) * 8
    steps = _TWO_TERM_STEPS if is_two_terms else 127
    peak = B.Bind(T.max(_largest_magnitude(low, high), T.float32(_TINY)))
    scale = B.Bind(peak * T.float32(1 / steps))
    inverse = B.Bind(splat(T.float32(steps) / peak))

    def store(q: Any, at: Any) -> None:
        words = T.reinterpret("int32x4", T.Cast("int8x16", q))
        B.buffer_store(xq, words, [row, ramp(at, 4)])

    half_sums = []
    for half, values in enumerate((low, high)):
        at = group * 8 + half * 4
        rounded = B.Bind(T.nearbyint(values * inverse))
        q = B.Bind(T.Cast("int32x16", rounded))
        if is_two_terms:
            coarse = T.nearbyint(rounded * constant(1 / HIGH_STEP))
            coarse = B.Bind(T.Cast("int32x16", coarse))
            store(B.Bind(q - coarse * splat(T.int32(HIGH_STEP))), at)
            store(coarse, num_groups * 8 + at)
        else:
            store(q, at)
        total = T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", q)
        half_sum = B.Bind(T.Cast("float32", total) * scale)
        B.buffer_store(sums, half_sum, [row, num_groups + group * 2 + half])
        half_sums.append(half_sum)
    B.buffer_store(scales, scale, [row, group])
    B.buffer_store(sums, half_sums[0] + half_sums[1], [row, group])


def _largest_magnitude(low: Any, high: Any) -> Any:
    """max |x| of two vectors. Without their signs, floats are ordered as integers are; LLVM reduces
    integers by halves, but floats one after another, for the sake of NaN."""
    mask = splat(T.uint32(0x7FFFFFFF))
    bits = [T.bitwise_and(T.reinterpret("uint32x16", v), mask) for v in (low, high)]
    largest = T.call_llvm_pure_intrin("uint32", "llvm.vector.reduce.umax", T.max(*bits))
    return T.reinterpret("float32", largest)


def _tail(x: Any, row: Any, start: int, k: int) -> tuple[Any, Any]:
    """32 values from `start` on, zeros from k on."""
    scratch = local_array(GROUP)
    for half in (0, LANES):
        B.buffer_store(scratch, constant(0.0), [ramp(half)])
    if start < k:
        with B.serial(T.int64(k - start)) as i:
            B.buffer_store(scratch, x[row, start + i], [i])
    return B.Bind(scratch[ramp(0)]), B.Bind(scratch[ramp(LANES)])
