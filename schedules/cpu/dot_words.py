"""Sums of products of 8-bit weights and activations as 16-bit words, where bytes would overflow.

Before VNNI, x86 adds neighbouring products of bytes up in 16 bits, too few for q up to 255. Its
products of 16-bit words are exact.
"""

from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .byte_dots import ByteDot
from .packing import PackedWeight
from .vectors import LANES, dtype_of, ramp, splat


def word_dots(
    unit: ByteDot,
    weight: PackedWeight,
    packed: Any,
    q_start: Any,
    x_words: list[Any],
    starts: list[Any],
) -> list[list[Any]]:
    """Σ q·x of a group, int32, by token and register of rows; q is at byte `q_start`.

    `x_words`: for each token a vector of int32, 4 int8 a lane.
    `starts`: for each token an int32 vector to add to.
    """
    multiply = unit.multiply_words
    assert multiply is not None
    num_words, num_tokens = weight.words, len(x_words)
    x16 = B.alloc_buffer(
        (num_tokens * 2 * num_words,), "int32", annotations={"disable_lower_builtin": True}
    )
    for i, x_word in enumerate(x_words):
        for odd, values in enumerate(_even_and_odd(x_word, num_words)):
            at = ramp((2 * i + odd) * num_words, num_words)
            B.buffer_store(x16, T.reinterpret(dtype_of("int32", num_words), values), [at])
    width = 2 * unit.lanes
    word_type = dtype_of("uint16", width)
    sums = [[start] * (LANES // unit.lanes) for start in starts]
    for j in range(num_words):
        at = range(64 * j, 64 * (j + 1), 2 * width)
        loaded = [packed[ramp(q_start + byte, 2 * width)] for byte in at]
        words = [B.Bind(T.reinterpret(word_type, q)) for q in loaded]
        even = [B.Bind(T.bitwise_and(q, splat(T.uint16(255), width))) for q in words]
        odds = [B.Bind(T.shift_right(q, splat(T.uint16(8), width))) for q in words]
        for odd, registers in enumerate((even, odds)):
            for i in range(num_tokens):
                x = splat(x16[(2 * i + odd) * num_words + j], unit.lanes)
                x = B.Bind(T.reinterpret(dtype_of("int16", width), x))
                for r, q in enumerate(registers):
                    q = T.reinterpret(dtype_of("int16", width), q)
                    sums[i][r] = B.Bind(sums[i][r] + multiply(q, x))
    return sums


def _even_and_odd(x_word: Any, num_words: int) -> tuple[Any, Any]:
    """(x of k = 4j and 4j + 2, x of k = 4j + 1 and 4j + 3) as int16."""
    width = 2 * num_words
    eight = splat(T.int16(8), width)
    both = B.Bind(T.reinterpret(dtype_of("int16", width), x_word))
    return T.shift_right(T.shift_left(both, eight), eight), T.shift_right(both, eight)
