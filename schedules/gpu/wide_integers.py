"""Unsigned integers of 64 bits as two of 32, which every GPU computes in."""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from .kernel import bind, registers, settled, store


@dataclass(frozen=True, slots=True)
class Wide:
    """high · 2^32 + low, both uint32."""

    high: Any
    low: Any

    @staticmethod
    def of(value: int) -> "Wide":
        return Wide(T.uint32(value >> 32), T.uint32(value & 0xFFFFFFFF))

    def plus(self, other: "Wide") -> "Wide":
        low = settled(self.low + other.low)
        carry = T.Cast("uint32", low < other.low)
        return Wide(settled(self.high + other.high + carry), low)

    def minus(self, other: "Wide") -> "Wide":
        """`other` is not the larger one."""
        borrow = T.Cast("uint32", self.low < other.low)
        return Wide(settled(self.high - other.high - borrow), settled(self.low - other.low))

    def is_below(self, other: "Wide") -> Any:
        is_low = T.And(self.high == other.high, self.low < other.low)
        return T.Or(self.high < other.high, is_low)

    def is_equal(self, other: "Wide") -> Any:
        return T.And(self.high == other.high, self.low == other.low)

    def times_fraction(self, fraction: Any) -> "Wide":
        """The product with fraction / 2^32, rounded down; `fraction` is uint32."""
        upper, lower = _product(self.high, fraction), _product(self.low, fraction)
        return upper.plus(Wide(T.uint32(0), lower.high))

    def has_remainder(self, fraction: Any) -> Any:
        """Whether `times_fraction` had to round."""
        return self.low * fraction != T.uint32(0)


def _product(a: Any, b: Any) -> Wide:
    """Of two uint32, from products of their halves."""
    mask, half = T.uint32(0xFFFF), T.uint32(16)
    a_low, a_high = bind(T.bitwise_and(a, mask)), bind(T.shift_right(a, half))
    b_low, b_high = bind(T.bitwise_and(b, mask)), bind(T.shift_right(b, half))
    low = settled(a_low * b_low)
    # At most (2^16 - 1)^2 + 2 (2^16 - 1), which is below 2^32.
    middle = settled(a_high * b_low + T.shift_right(low, half))
    other = settled(a_low * b_high + T.bitwise_and(middle, mask))
    high = a_high * b_high + T.shift_right(middle, half) + T.shift_right(other, half)
    return Wide(
        settled(high),
        settled(T.bitwise_or(T.shift_left(other, half), T.bitwise_and(low, mask))),
    )


class WideRegister:
    """A variable of each thread's own."""

    def __init__(self) -> None:
        self._words = registers(2, "uint32")
        self.set(Wide.of(0))

    def get(self) -> Wide:
        return Wide(bind(self._words[0]), bind(self._words[1]))

    def set(self, value: Wide) -> None:
        store(self._words, value.high, 0)
        store(self._words, value.low, 1)

    def add(self, value: Wide) -> None:
        self.set(self.get().plus(value))
