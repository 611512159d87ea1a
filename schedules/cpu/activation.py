"""Activations as int8 in groups of 32, for the integer dot products of `dot_int8`.

One term:   x ≈ xq · scale,   xq in [-127, 127],       scale = max |x| / 127
Two terms:  x ≈ xq · scale,   xq in [-32639, 32639],   scale = max |x| / 32639,
            xq = 256 · high + low,   high in [-127, 127], low in [-128, 127]

One is the usual W4A8. Two cost a second pass of dot products, which decoding hides behind the
weights' memory traffic, and are as exact as float32 activations for all practical purposes.

Sums over groups of 32, and of 16, come with them: of x, which minimums of weights multiply, and of
xq, which zero points do.
"""

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows
from .kernel import body, kernel, kernel_factory
from .vectors import LANES, constant, local_array, ramp, splat

GROUP = 32
HIGH_BITS = 8
"""One step of the high term is worth 2^HIGH_BITS of the low one."""
_STEPS = {1: 127, 2: 127 * 256 + 127}
"""From 0 to the largest, by terms; of two, one more would round the high one to 128."""
_TINY = 1e-30


def padded_k(k: int) -> int:
    """K as the int8 kernels read it: whole pairs of groups."""
    return -(-k // (2 * GROUP)) * 2 * GROUP


def activation_buffers(k: int, m: Any, terms: int) -> list[tuple[tuple[Any, int], str]]:
    """Shapes and dtypes of `quantize_activations`' outputs for m tokens (a number or symbolic).

    xq [m, terms · K/4] int32 (4 int8 a word; all of the low term, then all of the high one),
    scales [m, K/32], sums of x [m, K/32 + K/16], sums of xq likewise, int32; K is padded.
    """
    groups = padded_k(k) // GROUP
    return [
        ((m, terms * groups * 8), "int32"),
        ((m, groups), "float32"),
        ((m, groups * 3), "float32"),
        ((m, groups * 3), "int32"),
    ]


@kernel_factory
def quantize_activations(k: int, terms: int) -> tirx.PrimFunc:
    """x [m, K] float32 → the buffers of `activation_buffers`."""
    with kernel(f"quantize_activations_{k}_int{8 * terms}") as (func, ib):
        x = func.buffer("x", ("num_tokens", k), "float32")
        specs = activation_buffers(k, "num_tokens", terms)
        names = ("xq", "scales", "sums", "steps")
        buffers = [func.buffer(name, *spec) for name, spec in zip(names, specs, strict=True)]

        def emit(row: Any) -> None:
            with B.serial(T.int64(k // GROUP)) as group:
                at = group * GROUP
                low, high = x[row, ramp(at)], x[row, ramp(at + LANES)]
                quantize_group(buffers, row, group, B.Bind(low), B.Bind(high))
            for group in range(k // GROUP, padded_k(k) // GROUP):
                low, high = _tail(x, row, group * GROUP, k)
                quantize_group(buffers, row, T.int64(group), low, high)

        with body():
            for_rows(func.size("num_tokens"), k, emit)
    return ib.get()


def quantize_group(buffers: Sequence[Any], row: Any, group: Any, low: Any, high: Any) -> None:
    """Emit the rounding of one group, given as two bound vectors, into the buffers."""
    xq, scales, sums, steps = buffers
    num_groups = scales.shape[1]
    terms = int(xq.shape[1]) // (int(num_groups) * 8)
    peak = B.Bind(T.max(_largest_magnitude(low, high), T.float32(_TINY)))
    inverse = B.Bind(splat(T.float32(_STEPS[terms]) / peak))

    def store(q: Any, at: Any) -> None:
        words = T.reinterpret("int32x4", T.Cast("int8x16", q))
        B.buffer_store(xq, words, [row, ramp(at, 4)])

    scale = B.Bind(peak * T.float32(1 / _STEPS[terms]))
    B.buffer_store(scales, scale, [row, group])

    def store_sum(total: Any, at: Any) -> None:
        B.buffer_store(steps, total, [row, at])
        B.buffer_store(sums, T.Cast("float32", total) * scale, [row, at])

    half_sums = []
    for half, values in enumerate((low, high)):
        at = group * 8 + half * 4
        q = B.Bind(T.Cast("int32x16", T.nearbyint(values * inverse)))
        if terms == 2:
            rounded = q + splat(T.int32(1 << (HIGH_BITS - 1)))
            coarse = B.Bind(T.shift_right(rounded, splat(T.int32(HIGH_BITS))))
            store(B.Bind(q - T.shift_left(coarse, splat(T.int32(HIGH_BITS)))), at)
            store(coarse, num_groups * 8 + at)
        else:
            store(q, at)
        half_sum = B.Bind(T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", q))
        store_sum(half_sum, num_groups + group * 2 + half)
        half_sums.append(half_sum)
    store_sum(B.Bind(half_sums[0] + half_sums[1]), group)


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
