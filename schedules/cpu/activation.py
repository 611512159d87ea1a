"""Activations as int8 in groups of 32, for the integer dot products of `dot_int8`.

One term:   x ≈ scale · high,                       scale = max |x| / 127
Two terms:  x ≈ scale · high + scale / 256 · low,   scale = max |x| / (127 + 127 / 256)

with high and low in [-128, 127]. One is the usual W4A8. Both of all groups are as
exact as float32 activations for all practical purposes, and cost a second pass of dot products. But
the error of a group grows with the square of its scale, and inputs of language models have a few
channels that are far larger than the others (Dettmers et al., LLM.int8(), 2022): so a token may
keep the low terms of its largest groups alone, those with

    scale² ≥ threshold · mean of scale² over the groups of the token

Sums over groups of 32, and of 16, come with them: of scale · high, which minimums of weights
multiply, and of the terms, which zero points do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows
from .kernel import body, kernel, kernel_factory
from .vectors import LANES, constant, fma, local_array, ramp, splat

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
    are 0, and what they and their sums are is undefined.
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
def quantize_activations(
    k: int, terms: int, threshold: float = 0.0, has_halves: bool = True
) -> tirx.PrimFunc:
    """x [m, K] float32 → the buffers of `activation_buffers`.

    A threshold of 0 keeps the low terms of all groups; those that are not kept are not written, nor
    are sums over groups of 16 without `has_halves`.
    """
    name = f"quantize_activations_{k}_{terms}_{threshold}_{has_halves}".replace(".", "_")
    with kernel(name) as (func, ib):
        x = func.buffer("x", ("num_tokens", k), "float32")
        specs = activation_buffers(k, "num_tokens", terms)
        names = ("xq", "scales", "sums", "steps", "kept")[: len(specs)]
        buffers = [func.buffer(name, *spec) for name, spec in zip(names, specs, strict=True)]
        rounding = _Rounding(x, k, terms, has_halves, *buffers)

        def emit(row: Any) -> None:
            rounding.for_groups(lambda group: rounding.emit_high(row, group))
            if terms == 2:
                rounding.emit_kept(row, threshold)

        with body():
            for_rows(func.size("num_tokens"), k, emit)
    return ib.get()


@dataclass(frozen=True, slots=True)
class _Rounding:
    """Emits the rounding of rows of x into the buffers of `activation_buffers`."""

    x: Any
    k: int
    terms: int
    has_halves: bool
    xq: Any
    scales: Any
    sums: Any
    steps: Any
    kept: Any = None

    @property
    def num_groups(self) -> int:
        """With those of padding."""
        return padded_k(self.k) // GROUP

    def for_groups(self, emit: Callable[[Any], None]) -> None:
        """`emit(group)` for all groups; for whole ones in a loop."""
        whole = self.k // GROUP
        with B.serial(T.int64(whole)) as group:
            emit(group)
        for number in range(whole, self.num_groups):
            emit(tirx.IntImm("int64", number))

    def values(self, row: Any, group: Any) -> list[Any]:
        """A group of x as two bound vectors, zeros from K on."""
        if isinstance(group, tirx.IntImm):
            return _tail(self.x, row, int(group) * GROUP, self.k)
        at = group * GROUP
        return [B.Bind(self.x[row, ramp(at)]), B.Bind(self.x[row, ramp(at + LANES)])]

    def emit_high(self, row: Any, group: Any) -> None:
        """Emit a group's scale and high term."""
        values = self.values(row, group)
        # NaN is no more than 1e-30, nor less: as the second one of the two it comes through.
        peak = B.Bind(T.max(T.float32(_TINY), _largest_magnitude(*values)))
        scale = B.Bind(peak * T.float32(1 / _STEPS[self.terms]))
        B.buffer_store(self.scales, scale, [row, group])
        inverse = B.Bind(splat(T.float32(_STEPS[self.terms]) / peak))
        q = [B.Bind(T.Cast("int32x16", T.nearbyint(each * inverse))) for each in values]
        for at, total in self._emit_term(row, group, 0, q):
            B.buffer_store(self.sums, T.Cast("float32", total) * scale, [row, at])

    def emit_kept(self, row: Any, threshold: float) -> None:
        """Emit the flags, scales and low terms of the row, given its high ones."""
        squares = local_array(1)
        B.buffer_store(squares, T.float32(0), [0])

        def add_square(group: Any) -> None:
            scale = B.Bind(self.scales[row, group])
            B.buffer_store(squares, squares[0] + scale * scale, [0])

        self.for_groups(add_square)
        least = B.Bind(squares[0] * T.float32(threshold / -(-self.k // GROUP)))
        for word in range(-(-self.num_groups // KEPT_BITS)):
            B.buffer_store(self.kept, T.int64(0), [row, word])

        def choose(group: Any) -> None:
            if isinstance(group, tirx.IntImm) and int(group) * GROUP >= self.k:
                B.buffer_store(self.scales, T.float32(0), [row, self.num_groups + group])
                return
            scale = B.Bind(self.scales[row, group])
            is_kept = B.Bind(scale * scale >= least)
            low_scale = T.Select(is_kept, scale * T.float32(_LOW), T.float32(0))
            B.buffer_store(self.scales, low_scale, [row, self.num_groups + group])
            with B.If(is_kept), B.Then():
                word = group // KEPT_BITS
                flag = T.shift_left(T.int64(1), group % KEPT_BITS)
                B.buffer_store(self.kept, T.bitwise_or(self.kept[row, word], flag), [row, word])
                self._emit_low(row, group, scale)

        self.for_groups(choose)

    def _emit_low(self, row: Any, group: Any, scale: Any) -> None:
        inverse = B.Bind(splat(T.float32(1 / _LOW) / scale))
        q = []
        for half, value in enumerate(self.values(row, group)):
            words = self.xq[row, ramp(group * 8 + half * 4, 4)]
            high = T.Cast("float32x16", T.reinterpret("int8x16", words))
            left = T.nearbyint(fma(value, inverse, high * constant(-1 / _LOW), LANES))
            steps = T.Cast("int32x16", left)
            # What lies between two steps of the high term may be a step too much.
            q.append(B.Bind(T.max(T.min(steps, splat(T.int32(127))), splat(T.int32(-128)))))
        self._emit_term(row, group, 1, q)

    def _emit_term(
        self, row: Any, group: Any, term: int, halves: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        """Emit a group's q, given as two vectors, and their sums; (where these are of a term, the
        bound sum) of each."""
        for half, q in enumerate(halves):
            at = (term * self.num_groups + group) * 8 + half * 4
            words = T.reinterpret("int32x4", T.Cast("int8x16", q))
            B.buffer_store(self.xq, words, [row, ramp(at, 4)])
        sums = [(group, _sum(halves[0] + halves[1]))]
        if self.has_halves:
            first = self.num_groups + group * 2
            sums += [(first + half, _sum(q)) for half, q in enumerate(halves)]
        for at, total in sums:
            B.buffer_store(self.steps, total, [row, term * 3 * self.num_groups + at])
        return sums


def _sum(vector: Any) -> Any:
    return B.Bind(T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", vector))


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
