"""Halves on Apple's GPUs: two in a uint32, the lower one first, by Metal's own vectors."""

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from .kernel import bind, store

_EXACT_INTEGERS = 0x64006400
"""Twice the half 1024: its last ten bits count by one."""


def load_halves(source: Any, row: Any, column: Any) -> list[Any]:
    """Eight halves of a row in four uint32; `column` is a multiple of 4."""
    words = []
    for first in (0, 4):
        halves = bind(source[row, T.ramp(column + first, 1, 4)])
        both = bind(T.reinterpret("uint32x2", halves))
        words += [bind(T.Shuffle([both], [lane])) for lane in range(2)]
    return words


def store_halves(tile: Any, at: Any, words: Sequence[Any]) -> None:
    """Store 8 halves, in 4 uint32, at a multiple of 8."""
    for i in (0, 2):
        halves = T.reinterpret("float16x4", T.Shuffle(list(words[i : i + 2]), [0, 1]))
        store(tile, halves, T.ramp(at + 2 * i, 1, 4))


def pack_halves(low: Any, high: Any) -> Any:
    """Two float32 rounded to halves, in a uint32."""
    return T.reinterpret("uint32", T.Cast("float16x2", T.Shuffle([low, high], [0, 1])))


def decode_pair(pair: Any, zero: Any, scale: Any, low_end: Any) -> Any:
    """(pair - zero) · scale + low_end of two halves in a uint32; all float16, rounded once if
    pair - zero is a small integer."""
    q = T.reinterpret("float16x2", pair) - T.Broadcast(zero, 2)
    factors = (q, T.Broadcast(scale, 2), T.Broadcast(low_end, 2))
    return T.reinterpret("uint32", T.call_pure_extern("float16x2", "fma", *factors))


def byte_pair(word: Any, first: int) -> Any:
    """The halves 1024 + byte, of the bytes `first` (0 or 2) and `first` + 1 of a word."""
    low = T.shift_right(word, T.uint32(16)) if first else word
    high = T.shift_right(word, T.uint32(8)) if first else T.shift_left(word, T.uint32(8))
    both = T.bitwise_or(T.bitwise_and(low, T.uint32(0xFF)), T.bitwise_and(high, T.uint32(0xFF0000)))
    return T.bitwise_or(both, T.uint32(_EXACT_INTEGERS))
