"""Activations as int8 in groups of 32, for the integer dot products of `dot_int8`.

One term:   x ≈ scale · high,                       scale = max |x| / 127
Two terms:  x ≈ scale · high + scale / 256 · low,   scale = max |x| / (127 + 127 / 256)

with high in [-127, 127] and low in [-128, 127]. One is the usual W4A8. Both of all groups are as
exact as float32 activations for all practical purposes, and cost a second pass of dot products. But
the error of a group grows with the square of its scale, and inputs of language models have a few
channels that are far larger than the others (Dettmers et al., LLM.int8(), 2022): so a token may
keep the low terms of its largest groups alone, those with

    scale² ≥ threshold · mean of scale² over the groups of the token

Sums over groups of 32, and of 16, come with them: of scale · high, which minimums of weights
multiply, and of the terms, which zero points do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows
from .kernel import body, kernel, kernel_factory
from .vectors import LANES, constant, local_array, ramp, splat

GROUP = 32
KEPT_BITS = 64
"""Groups whose low terms a word of flags says of whether they are kept."""
_HIGH_BITS = 8
"""One step of the high term is worth 2^_HIGH_BITS of the low one."""
_LOW = 1 / (1 << _HIGH_BITS)
_STEPS = {1: 127, 2: 127 + 127 * _LOW}
"""Of the high term from 0 to the largest, by terms; of two, one more would round it to 128."""
_TINY = 1e-30


def padded_k(k: int) -> int:
    """K as the int8 kernels read it: whole pairs of groups."""
    return -(-k // (2 * GROUP)) * 2 * GROUP


def activation_buffers(k: int, m: Any, terms: int) -> list[tuple[tuple[Any, int], str]]:
    """Shapes and dtypes of `quantize_activations`' outputs for m tokens (a number or symbolic).

    xq [m, terms · K/4] int32 (4 int8 a word), scales [m, terms · K/32], sums of scale · high
    [m, K/32 + K/16], sums of the terms [m, terms · (K/32 + K/16)] int32; K is padded, and all of
    the high term comes before all of the low one. With two terms, flags [m, K/32/64] int64 of the
    groups that keep the low one, the first in the lowest bit; scales of low terms that are not kept
    are 0.
    """
    groups = padded_k(k) // GROUP
    specs: list[tuple[tuple[Any, int], str]] = [
        ((m, terms * groups * 8), "int32"),
        ((m, terms * groups), "float32"),
        ((m, groups * 3), "float32"),
        ((m, terms * groups * 3), "int32"),
    ]
    return specs if terms == 1 else [*specs, ((m, -(-groups // KEPT_BITS)), "int64")]


@kernel_factory
def quantize_activations(k: int, terms: int, threshold: float = 0.0) -> tirx.PrimFunc:
    """x [m, K] float32 → the buffers of `activation_buffers`; 0 keeps the low terms of all."""
    with kernel(f"quantize_activations_{k}_{terms}_{threshold}".replace(".", "_")) as (func, ib):
        x = func.buffer("x", ("num_tokens", k), "float32")
        specs = activation_buffers(k, "num_tokens", terms)
        names = ("xq", "scales", "sums", "steps", "kept")[: len(specs)]
        buffers = [func.buffer(name, *spec) for name, spec in zip(names, specs, strict=True)]
        rounding = _Rounding(k, terms, *buffers)

        def emit(row: Any) -> None:
            with B.serial(T.int64(k // GROUP)) as group:
                at = group * GROUP
                first, second = x[row, ramp(at)], x[row, ramp(at + LANES)]
                rounding.emit_group(row, group, [B.Bind(first), B.Bind(second)])
            for group in range(k // GROUP, rounding.num_groups):
                rounding.emit_group(row, T.int64(group), _tail(x, row, group * GROUP, k))
            if terms == 2:
                rounding.choose_kept(row, threshold)

        with body():
            for_rows(func.size("num_tokens"), k, emit)
    return ib.get()


@dataclass(frozen=True, slots=True)
class _Rounding:
    """Emits the rounding of rows into the buffers of `activation_buffers`."""

    k: int
    terms: int
    xq: Any
    scales: Any
    sums: Any
    steps: Any
    kept: Any = None

    @property
    def num_groups(self) -> int:
        return padded_k(self.k) // GROUP

    def emit_group(self, row: Any, group: Any, values: Sequence[Any]) -> None:
        """Emit one group, given as two bound vectors."""
        peak = B.Bind(T.max(_largest_magnitude(*values), T.float32(_TINY)))
        scale = B.Bind(peak * T.float32(1 / _STEPS[self.terms]))
        B.buffer_store(self.scales, scale, [row, group])
        steps_of_low = 1 << _HIGH_BITS if self.terms == 2 else 1
        inverse = B.Bind(splat(T.float32(_STEPS[self.terms] * steps_of_low) / peak))
        halves = []
        for each in values:
            q = B.Bind(T.Cast("int32x16", T.nearbyint(each * inverse)))
            if self.terms == 1:
                halves.append([q])
                continue
            rounded = q + splat(T.int32(1 << (_HIGH_BITS - 1)))
            high = B.Bind(T.shift_right(rounded, splat(T.int32(_HIGH_BITS))))
            low = B.Bind(q - T.shift_left(high, splat(T.int32(_HIGH_BITS))))
            halves.append([high, low])
        for term, both in enumerate(zip(*halves, strict=True)):
            self._emit_term(row, group, term, both, scale)

    def _emit_term(
        self, row: Any, group: Any, term: int, halves: Sequence[Any], scale: Any
    ) -> None:
        totals = []
        for half, q in enumerate(halves):
            at = (term * self.num_groups + group) * 8 + half * 4
            words = T.reinterpret("int32x4", T.Cast("int8x16", q))
            B.buffer_store(self.xq, words, [row, ramp(at, 4)])
            totals.append(B.Bind(T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", q)))
        places = [self.num_groups + group * 2, self.num_groups + group * 2 + 1, group]
        for at, total in zip(places, [*totals, totals[0] + totals[1]], strict=True):
            B.buffer_store(self.steps, total, [row, term * 3 * self.num_groups + at])
            if term == 0:
                B.buffer_store(self.sums, T.Cast("float32", total) * scale, [row, at])

    def choose_kept(self, row: Any, threshold: float) -> None:
        """Emit the flags of the row and the scales of its low terms, given all others."""
        scales, count = self.scales, -(-self.k // GROUP)
        for group in range(count, self.num_groups):
            B.buffer_store(scales, T.float32(0), [row, self.num_groups + group])
        squares = local_array(1)
        B.buffer_store(squares, T.float32(0), [0])
        with B.serial(T.int64(count)) as group:
            scale = B.Bind(scales[row, group])
            B.buffer_store(squares, squares[0] + scale * scale, [0])
        least = B.Bind(squares[0] * T.float32(threshold / count))
        for word in range(0, count, KEPT_BITS):
            B.buffer_store(self.kept, T.int64(0), [row, word // KEPT_BITS])
            with B.serial(T.int64(min(KEPT_BITS, count - word))) as bit:
                scale = B.Bind(scales[row, bit + word])
                is_kept = B.Bind(scale * scale >= least)
                low_scale = T.Select(is_kept, scale * T.float32(_LOW), T.float32(0))
                B.buffer_store(scales, low_scale, [row, bit + (self.num_groups + word)])
                flag = T.shift_left(T.Cast("int64", is_kept), bit)
                flags = T.bitwise_or(self.kept[row, word // KEPT_BITS], flag)
                B.buffer_store(self.kept, flags, [row, word // KEPT_BITS])


def _largest_magnitude(low: Any, high: Any) -> Any:
    """max |x| of two vectors. Without their signs, floats are ordered as integers are; LLVM reduces
    integers by halves, but floats one after another, for the sake of NaN."""
    mask = splat(T.uint32(0x7FFFFFFF))
    bits = [T.bitwise_and(T.reinterpret("uint32x16", v), mask) for v in (low, high)]
    largest = T.call_llvm_pure_intrin("uint32", "llvm.vector.reduce.umax", T.max(*bits))
    return T.reinterpret("float32", largest)


def _tail(x: Any, row: Any, start: int, k: int) -> list[Any]:
    """32 values from `start` on, zeros from k on."""
    scratch = local_array(GROUP)
    for half in (0, LANES):
        B.buffer_store(scratch, constant(0.0), [ramp(half)])
    if start < k:
        with B.serial(T.int64(k - start)) as i:
            B.buffer_store(scratch, x[row, start + i], [i])
    return [B.Bind(scratch[ramp(0)]), B.Bind(scratch[ramp(LANES)])]
