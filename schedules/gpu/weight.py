"""Weights in the artifact's formats, read a few values at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from ...artifact.tensor_format import TensorFormat
from .kernel import Kernel, bind, floor_div, floor_mod, registers, store, vector_width

HALVES = ("float16", "bfloat16")
_ONE = 0x3F800000
"""The bits of the float 1."""


def words_of(shape: Sequence[int]) -> tuple[int]:
    """The shape of a 16-bit tensor as words of two values; an odd last value is in none."""
    return (max(math.prod(shape) // 2, 1),)


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A weight [n, k] of some format (see `TensorFormat`), as an operator's constant."""

    format: TensorFormat
    n: int
    k: int
    halves_in_words: bool = False
    """Whether 16-bit floats come two in a uint32, a part in one row (see `words_of`)."""

    @property
    def step(self) -> int:
        """Values that are read together: consecutive along K, of one word and one group."""
        if self.format.bits is None:
            return next(step for step in (8, 4, 2, 1) if self.k % step == 0)
        return self.format.values_per_word

    @property
    def num_steps(self) -> int:
        k = self.k if self.format.bits is None else self.format.padded_k(self.k)
        return k // self.step

    @property
    def has_padding(self) -> bool:
        """Whether the last steps reach beyond K."""
        return self.num_steps * self.step > self.k

    @property
    def is_transposed(self) -> bool:
        """Whether neighbours in memory are rows (KN), not steps of one row (NK)."""
        return self.format.bits is not None and self.format.layout == "KN"

    @property
    def key(self) -> str:
        """Names format and shape, for names of kernels."""
        fmt = self.format
        if fmt.bits is None:
            return f"{fmt.dtype}_{self.n}_{self.k}"
        kind = "a" if fmt.is_affine else "s"
        layout = fmt.layout.lower()
        return f"q{fmt.bits}{kind}{fmt.group_size}_{fmt.dtype}_{layout}_{self.n}_{self.k}"

    def declare(self, k: Kernel, prefix: str = "") -> "WeightReader":
        """Declare the weight's parts as arguments of a kernel."""
        buffers = {}
        for part, (shape, dtype) in self.format.parts(self.n, self.k).items():
            if self.halves_in_words and dtype in HALVES:
                shape, dtype = words_of(shape), "uint32"
            buffers[part] = k.buffer(f"{prefix}{part}", shape, dtype)
        return WeightReader(self, buffers)


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads a weight inside a kernel."""

    weight: GpuWeight
    parts: dict[str, Any]
    one: Any = None
    """The bits of the float 1, in a form that `dots` can use; None: the constant."""

    def values(self, row: Any, step: Any) -> Sequence[Any]:
        """The float32 values [row, step · size …], bound; `step` is int32, in range."""
        weight, fmt = self.weight, self.weight.format
        size = weight.step
        if fmt.bits is None:
            at = bind(step * size)
            return [self._number("weight", row, at + i) for i in range(size)]
        bits = fmt.bits
        low_bits = 4 if bits in (5, 6) else bits
        word = bind(self.part("q_weight", row, step))
        values = [_field(word, i * low_bits, low_bits) for i in range(size)]
        if bits in (5, 6):
            high, high_bits = self.high_bits(row, step), bits - 4
            values = [
                T.bitwise_or(low, T.shift_left(_field(high, i * high_bits, high_bits), _u32(4)))
                for i, low in enumerate(values)
            ]
        group = bind(floor_div(step * size, fmt.group_size))
        scale = self._number("q_scale", row, group)
        if fmt.zero_point is None:
            low_end = self._number("q_min", row, group)
            return [bind(T.Cast("float32", q) * scale + low_end) for q in values]
        zero = T.float32(fmt.zero_point)
        return [bind((T.Cast("float32", q) - zero) * scale) for q in values]

    def with_hidden_one(self, size: Any) -> "WeightReader":
        """The same reader, whose `dots` gets the float 1 from a size, an int32 of at least 0.

        Compilers do not see that it is a constant, and make one operation of `(word & mask) | one`;
        with two constants NVIDIA's makes two.
        """
        sign = T.shift_right(T.Cast("uint32", size), _u32(31))
        return replace(self, one=bind(T.bitwise_or(sign, _u32(_ONE))))

    def load(self, row: Any, step: Any) -> Sequence[Any]:
        """What `dots` needs of [row, step · size …], loaded."""
        weight, fmt = self.weight, self.weight.format
        size = weight.step
        if fmt.bits is None:
            at = bind(step * size)
            if vector_width(size) == 1 or weight.halves_in_words or fmt.dtype == "bfloat16":
                return [self._number("weight", row, at + i) for i in range(size)]
            return load_floats(self.parts["weight"], (row,), at, size)
        words = [bind(self.part("q_weight", row, step))]
        high = [self.high_bits(row, step)] if fmt.bits in (5, 6) else []
        return [*words, *high, *self.scales(row, step)]

    def scales(self, row: Any, step: Any) -> list[Any]:
        """The scale, and the minimum if there is one, of a step's group."""
        fmt = self.weight.format
        group = bind(floor_div(step * self.weight.step, fmt.group_size))
        names = ("q_scale", "q_min") if fmt.is_affine else ("q_scale",)
        return [self._number(name, row, group) for name in names]

    def dots(
        self, loaded: Sequence[Any], xs: Sequence[Sequence[Any]], x_sums: Sequence[Any]
    ) -> list[Any]:
        """The product of what is loaded with each of xs, which are as many values; `x_sums` are
        their sums. Of quantized values there are loaded: words of one group, the word of their high
        bits if there is one, and the `scales`.

        Their bits become the highest of a mantissa, a float between 1 and 2, which takes fewer
        operations than to convert them; and the group's scale is taken out of the sum:

            f = 1 + q / 2^bits,    w = q · s + m = f · (2^bits · s) + (m - 2^bits · s)
        """
        fmt = self.weight.format
        if fmt.bits is None:
            return [_sum_of_products(x, loaded) for x in xs]
        floats = self._floats(loaded, len(xs[0]))
        totals = [bind(_sum_of_products(x, floats)) for x in xs]
        pairs = list(zip(totals, x_sums, strict=True))
        size = float(1 << fmt.bits)
        if fmt.is_affine:
            scale, low_end = loaded[-2:]
            factor = bind(scale * T.float32(size))
            rest = bind(low_end - factor)
            return [factor * total + rest * x_sum for total, x_sum in pairs]
        offset = T.float32(size + (fmt.zero_point or 0))
        return [loaded[-1] * (T.float32(size) * total - offset * x_sum) for total, x_sum in pairs]

    def _floats(self, loaded: Sequence[Any], count: int) -> list[Any]:
        """1 + q / 2^bits of each value."""
        bits, step = self.weight.format.bits, self.weight.step
        assert bits is not None
        low_bits, top = (4 if bits in (5, 6) else bits), 23 - bits
        one = _u32(_ONE) if self.one is None else self.one
        floats = []
        for i in range(count):
            field = _moved_field(loaded[i // step], i % step * low_bits, top, low_bits)
            if bits > low_bits:
                high_bits = bits - low_bits
                high = _moved_field(loaded[count // step], i * high_bits, top + low_bits, high_bits)
                field = T.bitwise_or(field, high)
            floats.append(bind(T.reinterpret("float32", T.bitwise_or(field, one))))
        return floats

    def high_bits(self, row: Any, step: Any) -> Any:
        """The word of the values' fifth and sixth bits, from a step's on."""
        high_bits = (self.weight.format.bits or 0) - 4
        size = self.weight.step
        steps_a_word = 32 // high_bits // size
        plane = self.part("q_high", row, floor_div(step, steps_a_word))
        shift = floor_mod(step, steps_a_word) * (size * high_bits)
        return bind(T.shift_right(plane, T.Cast("uint32", shift)))

    def _number(self, part: str, row: Any, column: Any) -> Any:
        """A float of a part as float32, bound."""
        dtype = self.weight.format.dtype
        if not self.weight.halves_in_words or dtype not in HALVES:
            return _float(self.part(part, row, column), dtype)
        (_, columns), _ = self.weight.format.parts(self.weight.n, self.weight.k)[part]
        if self.weight.is_transposed:
            row, column = column, row
        at = bind(row * columns + column)
        # An odd last one shares a word with what the device allocates beyond it.
        word = self.parts[part][floor_div(at, 2)]
        shift = T.Cast("uint32", floor_mod(at, 2) * 16)
        half = bind(T.bitwise_and(T.shift_right(word, shift), _u32(0xFFFF)))
        return _float_of_half(half) if dtype == "float16" else _float_of_bfloat16(half)

    def part(self, name: str, row: Any, column: Any) -> Any:
        """An element of a part of a quantized weight, `column` along K."""
        buffer = self.parts[name]
        return buffer[column, row] if self.weight.is_transposed else buffer[row, column]


def load_floats(buffer: Any, rows: Sequence[Any], first: Any, count: int) -> list[Any]:
    """buffer[*rows, first …], floats of any dtype, as `count` float32, an even number; read four
    or two at a time."""
    width, values = vector_width(count), []
    for start in range(0, count, width):
        vector = buffer[(*rows, T.ramp(first + start, 1, width))]
        if buffer.dtype == "bfloat16":  # not every device knows the dtype
            bits = T.Cast(f"uint32x{width}", T.reinterpret(f"uint16x{width}", vector))
            moved = T.shift_left(bits, T.Broadcast(_u32(16), width))
            floats = bind(T.reinterpret(f"float32x{width}", moved))
        else:
            floats = bind(T.Cast(f"float32x{width}", vector))
        values += [bind(T.Shuffle([floats], [lane])) for lane in range(width)]
    return values


def floats_of_bfloat16(words: Sequence[Any]) -> list[Any]:
    """The bfloat16 values of words of two, as float32."""
    values = []
    for word in words:
        values.append(bind(T.reinterpret("float32", T.shift_left(word, _u32(16)))))
        values.append(bind(T.reinterpret("float32", T.bitwise_and(word, _u32(0xFFFF0000)))))
    return values


def _u32(value: int) -> Any:
    return T.uint32(value)


def _float(value: Any, dtype: str) -> Any:
    if dtype == "bfloat16":  # the upper half of a float32; not every device knows the dtype
        return _float_of_bfloat16(T.Cast("uint32", T.reinterpret("uint16", value)))
    return bind(T.Cast("float32", value))


def _float_of_bfloat16(bits: Any) -> Any:
    return bind(T.reinterpret("float32", T.shift_left(bits, _u32(16))))


def _float_of_half(bits: Any) -> Any:
    """The float16 of these bits (IEEE 754 binary16, finite), without subnormal floats on the way:
    many GPUs take those for zero."""
    magnitude = bind(T.bitwise_and(bits, _u32(0x7FFF)))
    is_subnormal = magnitude < _u32(0x0400)
    # The exponent's bias is 127 - 15 = 112 more; below, the leading one is not there.
    moved = T.shift_left(magnitude, _u32(13))
    normal = T.reinterpret("float32", moved + _u32(112 << 23))
    subnormal = T.reinterpret("float32", moved + _u32(113 << 23)) - T.float32(2.0**-14)
    # In registers, or TVM writes all of this again wherever the value is used.
    value = registers(1)
    store(value, T.Select(is_subnormal, subnormal, normal), 0)
    store(value, T.Select(bits == magnitude, value[0], -value[0]), 0)
    return value[0]


def _sum_of_products(a: Sequence[Any], b: Sequence[Any]) -> Any:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + x * y
    return total


def _moved_field(word: Any, start: int, to: int, bits: int) -> Any:
    """Bits `start` … of a word at `to` …, all else 0."""
    if start > to:
        word = T.shift_right(word, _u32(start - to))
    elif start < to:
        word = T.shift_left(word, _u32(to - start))
    return T.bitwise_and(word, _u32(((1 << bits) - 1) << to))


def _field(word: Any, shift: int, bits: int) -> Any:
    shifted = T.shift_right(word, _u32(shift)) if shift else word
    return T.bitwise_and(shifted, _u32((1 << bits) - 1))
