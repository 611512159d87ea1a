"""Activations as int8 in groups of 32, for the integer dot products of `dot_int8`.

One term:   x ≈ scale · high,                       scale = max |x| / 127
Two terms:  x ≈ scale · high + scale / 256 · low,   scale = max |x| / (127 + 127 / 256)

with high and low in [-128, 127]. One is the usual W4A8. Both of all groups are as
exact as float32 activations for all practical purposes, and cost a second pass of dot products. But
the error of a group grows with the square of its scale, and inputs of language models have a few
channels that are far larger than the others (Dettmers et al., LLM.int8(), 2022): so a token may
keep the low terms of its largest groups alone, those with

    scale² ≥ threshold · mean of scale² over the groups of the token

Sums over groups of 32, and of 16, come with them: of the term, which zero points of weights
multiply, and of scale · term, which minimums do.

Everything about a group of one token lies side by side, and beside it the same of the next token,
as they are multiplied by the same weights: kernels read it as one stream.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows
from .kernel import body, kernel, kernel_factory
from .vectors import LANES, constant, fma, local_array, opaque, ramp, splat

GROUP = 32
_MANY_ROWS, _ROWS_AT_ONCE = 32, 4
KEPT_BITS = 64
"""Groups whose low terms a word of flags says of whether they are kept."""
WORDS = GROUP // 4
"""Of a term of a group, 4 int8 each."""
SCALE, STEP_SUM, OFFSET, START = range(WORDS, WORDS + 4)
"""Words of a group's record that are behind those of its term (see `activation_buffers`)."""
RECORD = WORDS + 4
_TINY = 1e-30


def padded_k(k: int) -> int:
    """K as the int8 kernels read it: whole pairs of groups."""
    return -(-k // (2 * GROUP)) * 2 * GROUP


def activation_buffers(k: int, m: Any, terms: int) -> list[tuple[tuple[Any, ...], str]]:
    """Shapes and dtypes of `quantize_activations`' outputs for m tokens (a number or symbolic).

    groups [terms · K/32, m, 12] int32: of each group and token a record of the words of the term (4
    int8 each), its scale (float32), the sum of the term, that times the scale (float32) or minus a
    zero point (int32), and what `Starts` says. K is padded, and all of the high term comes before
    all of the low one. halves [terms · K/16, m, 2] has the sums of groups of 16, and these times
    the scale. With two terms, flags [m, K/32/64] int64 of the groups that keep the low one, the
    first in the lowest bit; records of low terms that are not kept are undefined.
    """
    groups = padded_k(k) // GROUP
    specs: list[tuple[tuple[Any, ...], str]] = [
        ((terms * groups, m, RECORD), "int32"),
        ((terms * groups * 2, m, 2), "int32"),
    ]
    return specs if terms == 1 else [*specs, ((m, -(-groups // KEPT_BITS)), "int64")]


@dataclass(frozen=True, slots=True)
class Starts:
    """What the sums of a group of a term begin with: -zero_point · Σ term, rounded, and where
    `num_pairs` words are multiplied in pairs, what these have too much of x (see `dot_many`)."""

    zero_point: int | Fraction = 0
    """A multiple of some 1/2^n."""
    num_pairs: int = 0

    @property
    def largest(self) -> int:
        """Of a term: sums with weights of 4 bits are bytes as well."""
        return 120 if self.num_pairs else 127

    @property
    def low_steps(self) -> int:
        """Of the low term, that are one step of the high one."""
        return 240 if self.num_pairs else 256

    def offset(self, total: Any) -> Any:
        """-zero_point · total, int32, rounded to nearest."""
        numerator, denominator = self.zero_point.as_integer_ratio()
        product = total * T.int32(-numerator)
        if denominator == 1:
            return product
        shift = denominator.bit_length() - 1
        return T.shift_right(product + T.int32(denominator // 2), T.int32(shift))


@kernel_factory
def quantize_activations(
    k: int,
    terms: int,
    threshold: float = 0.0,
    has_halves: bool = True,
    starts: Starts | None = None,
) -> tirx.PrimFunc:
    """x [m, K] float32 → the buffers of `activation_buffers`.

    A threshold of 0 keeps the low terms of all groups; those that are not kept are not written, nor
    are sums over groups of 16 without `has_halves`, nor starts without pairs of words.
    """
    options = f"{threshold}_{has_halves}"
    if starts is not None:
        options += f"_{starts.zero_point}_{starts.num_pairs}"
    options = re.sub("[./]", "_", options)
    with kernel(f"quantize_activations_{k}_{terms}_{options}") as (func, ib):
        x = func.buffer("x", ("num_tokens", k), "float32")
        specs = activation_buffers(k, "num_tokens", terms)
        names = ("groups", "halves", "kept")[: len(specs)]
        buffers = [func.buffer(name, *spec) for name, spec in zip(names, specs, strict=True)]
        rounding = _Rounding(x, k, terms, has_halves, starts, *buffers)

        with body():
            num_rows = func.size("num_tokens")
            # Records of several rows fill whole lines of the cache, which would be there no more
            # when the next row comes: those of many rows all have their place in a few sets of it.
            has_many = num_rows >= _MANY_ROWS
            size = opaque(T.if_then_else(has_many, T.int64(_ROWS_AT_ONCE), T.int64(1)))

            def emit(unit: Any) -> None:
                first = opaque(unit * size)
                rounding.emit_rows(first, opaque(T.min(size, num_rows - first)), threshold)

            for_rows((num_rows + (size - 1)) // size, k, emit)
    return ib.get()


@dataclass(frozen=True, slots=True)
class _Rounding:
    """Emits the rounding of rows of x into the buffers of `activation_buffers`."""

    x: Any
    k: int
    terms: int
    has_halves: bool
    starts: Starts | None
    groups: Any
    halves: Any
    kept: Any = None

    @property
    def num_groups(self) -> int:
        """With those of padding."""
        return padded_k(self.k) // GROUP

    @property
    def steps(self) -> float:
        """Of the high term from 0 to the largest; of two terms, one more of the low one would round
        it up."""
        largest = (self.starts or Starts()).largest
        return largest if self.terms == 1 else largest + 0.5 - 1 / self.low_steps

    @property
    def low_steps(self) -> int:
        return (self.starts or Starts()).low_steps

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

    def emit_rows(self, first: Any, count: Any, threshold: float) -> None:
        """Emit the rounding of `count` rows, at most `_ROWS_AT_ONCE`, from `first` on."""
        squares = local_array(_ROWS_AT_ONCE)
        with B.serial(count) as i:
            B.buffer_store(squares, T.float32(0), [i])
            if self.terms == 2:
                for word in range(-(-self.num_groups // KEPT_BITS)):
                    B.buffer_store(self.kept, T.int64(0), [first + i, word])

        def emit_high(group: Any) -> None:
            with B.serial(count) as i:
                scale = self._emit_high(B.Bind(first + i), group)
                B.buffer_store(squares, squares[i] + scale * scale, [i])

        def emit_low(group: Any) -> None:
            if isinstance(group, tirx.IntImm) and int(group) * GROUP >= self.k:
                return
            with B.serial(count) as i:
                self._emit_if_kept(B.Bind(first + i), group, squares[i] * T.float32(share))

        share = threshold / -(-self.k // GROUP)
        self.for_groups(emit_high)
        if self.terms == 2:
            self.for_groups(emit_low)

    def _emit_high(self, row: Any, group: Any) -> Any:
        """Emit a group's record of the high term; its bound scale."""
        values = self.values(row, group)
        # NaN is no more than 1e-30, nor less: as the second one of the two it comes through.
        peak = B.Bind(T.max(T.float32(_TINY), _largest_magnitude(*values)))
        scale = B.Bind(peak * T.float32(1 / self.steps))
        inverse = B.Bind(splat(T.float32(self.steps) / peak))
        q = [B.Bind(T.Cast("int32x16", T.nearbyint(each * inverse))) for each in values]
        self._emit_term(row, group, 0, q, scale)
        return scale

    def _emit_if_kept(self, row: Any, group: Any, least: Any) -> None:
        """Emit a group's flag and its low term, if scale² is at least `least`."""
        scale = B.Bind(T.reinterpret("float32", self.groups[group, row, SCALE]))
        with B.If(scale * scale >= least), B.Then():
            word = group // KEPT_BITS
            flag = T.shift_left(T.int64(1), group % KEPT_BITS)
            B.buffer_store(self.kept, T.bitwise_or(self.kept[row, word], flag), [row, word])
            self._emit_low(row, group, scale)

    def _emit_low(self, row: Any, group: Any, scale: Any) -> None:
        inverse = B.Bind(splat(T.float32(self.low_steps) / scale))
        q = []
        for i, value in enumerate(self.values(row, group)):
            words = self.groups[group, row, ramp(i * 4, 4)]
            high = T.Cast("float32x16", T.reinterpret("int8x16", words))
            left = T.nearbyint(fma(value, inverse, high * constant(-self.low_steps), LANES))
            steps = T.Cast("int32x16", left)
            # What lies between two steps of the high term may be a step too much.
            half = self.low_steps // 2
            steps = T.max(T.min(steps, splat(T.int32(min(half, 127)))), splat(T.int32(-half)))
            q.append(B.Bind(steps))
        self._emit_term(row, group, 1, q, scale * T.float32(1 / self.low_steps))

    def _emit_term(self, row: Any, group: Any, term: int, q: Sequence[Any], scale: Any) -> None:
        """Emit a group's record of a term, its q given as two vectors."""
        group = term * self.num_groups + group
        halves = [B.Bind(T.Cast("int8x16", values)) for values in q]
        for half, values in enumerate(halves):
            words = T.reinterpret("int32x4", values)
            B.buffer_store(self.groups, words, [group, row, ramp(half * 4, 4)])
        starts = self.starts
        if starts is not None and starts.num_pairs:
            ones = splat(T.uint8(1))
            total = _sum(_dot_words(_dot_words(_NO_WORDS, ones, halves[0]), ones, halves[1]))
        else:
            total = _sum(q[0] + q[1])
        offset = _scaled(total, scale)
        if starts is not None and starts.zero_point:
            offset = B.Bind(starts.offset(total))
        if starts is not None and starts.num_pairs:
            start = offset if starts.zero_point else T.int32(0)
            start = start - _too_much(halves, starts.num_pairs)
            B.buffer_store(self.groups, start, [group, row, START])
        behind = ((SCALE, T.reinterpret("int32", scale)), (STEP_SUM, total), (OFFSET, offset))
        for at, value in behind:
            B.buffer_store(self.groups, value, [group, row, at])
        if self.has_halves:
            for half, values in enumerate(q):
                of_half = _sum(values)
                for i, value in enumerate((of_half, _scaled(of_half, scale))):
                    B.buffer_store(self.halves, value, [group * 2 + half, row, i])


_NO_WORDS = T.broadcast(T.int32(0), 4)


def _dot_words(sums: Any, a: Any, b: Any) -> Any:
    """Sums of products of bytes by word: uint8 by int8, of 16, added to int32."""
    return T.call_llvm_pure_intrin("int32x4", "llvm.x86.avx512.vpdpbusd.128", sums, a, b)


def _too_much(halves: Sequence[Any], num_pairs: int) -> Any:
    """What products of sums of the words of two halves have too much, but for weights alone (see
    `dot_many`; weights are from 0 on here, so that 8 · (one + other) is missing):
    (one + 120) · other - 8 · one."""
    one, other = halves
    more = T.reinterpret("uint8x16", one + splat(T.int8(120)))
    words = _dot_words(_NO_WORDS, more, other) - _dot_words(_NO_WORDS, splat(T.uint8(8)), one)
    is_paired = ramp(T.int32(0), 4) < splat(T.int32(num_pairs), 4)
    return _sum(T.Select(is_paired, words, _NO_WORDS))


def _scaled(total: Any, scale: Any) -> Any:
    """total · scale, as the bits of a float32."""
    return T.reinterpret("int32", T.Cast("float32", total) * scale)


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
