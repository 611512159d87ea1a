"""Weights in the artifact's formats, read a few values at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ...artifact.tensor_format import TensorFormat
from .kernel import Kernel, bind, floor_div, floor_mod


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A weight [n, k] of some format (see `TensorFormat`), as an operator's constant."""

    format: TensorFormat
    n: int
    k: int

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
        parts = self.format.parts(self.n, self.k)
        buffers = {
            part: k.buffer(f"{prefix}{part}", shape, dtype)
            for part, (shape, dtype) in parts.items()
        }
        return WeightReader(self, buffers)


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads a weight inside a kernel."""

    weight: GpuWeight
    parts: dict[str, Any]

    def values(self, row: Any, step: Any) -> Sequence[Any]:
        """The float32 values [row, step · size …], bound; `step` is int32, in range."""
        weight, fmt = self.weight, self.weight.format
        size = weight.step
        if fmt.bits is None:
            at = bind(step * size)
            return [_float(self.parts["weight"][row, at + i], fmt.dtype) for i in range(size)]
        bits = fmt.bits
        low_bits = 4 if bits in (5, 6) else bits
        word = bind(self._at("q_weight", row, step))
        values = [_field(word, i * low_bits, low_bits) for i in range(size)]
        if bits in (5, 6):
            high_bits = bits - 4
            steps_a_word = 32 // high_bits // size
            plane = self._at("q_high", row, floor_div(step, steps_a_word))
            shift = floor_mod(step, steps_a_word) * (size * high_bits)
            high = bind(T.shift_right(plane, T.Cast("uint32", shift)))
            values = [
                T.bitwise_or(low, T.shift_left(_field(high, i * high_bits, high_bits), _u32(4)))
                for i, low in enumerate(values)
            ]
        group = bind(floor_div(step * size, fmt.group_size))
        scale = _float(self._at("q_scale", row, group), fmt.dtype)
        if fmt.zero_point is None:
            low_end = _float(self._at("q_min", row, group), fmt.dtype)
            return [bind(T.Cast("float32", q) * scale + low_end) for q in values]
        zero = T.float32(fmt.zero_point)
        return [bind((T.Cast("float32", q) - zero) * scale) for q in values]

    def _at(self, part: str, row: Any, column: Any) -> Any:
        buffer = self.parts[part]
        return buffer[column, row] if self.weight.is_transposed else buffer[row, column]


def _u32(value: int) -> Any:
    return T.uint32(value)


def _float(value: Any, dtype: str) -> Any:
    if dtype == "bfloat16":  # the upper half of a float32; not every device knows the dtype
        bits = T.Cast("uint32", T.reinterpret("uint16", value))
        return bind(T.reinterpret("float32", T.shift_left(bits, _u32(16))))
    return bind(T.Cast("float32", value))


def _field(word: Any, shift: int, bits: int) -> Any:
    shifted = T.shift_right(word, _u32(shift)) if shift else word
    return T.bitwise_and(shifted, _u32((1 << bits) - 1))
