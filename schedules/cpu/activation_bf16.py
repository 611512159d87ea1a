"""Activations as bfloat16, for the dot products of `dot_bf16`.

One term:   x ≈ high,        the nearest bfloat16: 8 bits, as models in bfloat16 are trained with
Two terms:  x ≈ high + low,  low the nearest to what is left: 16 bits

Two cost a second pass of dot products, which decoding hides behind the weights' memory traffic.
"""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows
from .kernel import body, kernel, kernel_factory
from .vectors import LANES, constant, local_array, ramp, splat

PAIRS = 16
"""Pairs of k in a line of words."""
LINE = 2 * PAIRS
_ROUND = 0x7FFF
"""Added to a float32's bits, with the last one that stays: a carry into what stays rounds up, ties
to even."""


def bf16_activation_buffer(k: int, m: Any, terms: int) -> tuple[tuple[Any, int], str]:
    """Shape and dtype of `bf16_activations`' output for m tokens (a number or symbolic).

    [m, lines · 16] int32, a pair of consecutive k in a word, the even one low. A line has the words
    of 32 k; that of the low term follows that of the high one. K is padded with zeros to whole
    lines, and their number to an odd one: rows a multiple of 4096 bytes apart would share a few
    sets of the L1 cache.
    """
    lines = -(-k // LINE) * terms
    return (m, PAIRS * (lines | 1)), "int32"


@kernel_factory
def bf16_activations(k: int, terms: int) -> tirx.PrimFunc:
    """x [m, K] float32 → the buffer of `bf16_activation_buffer`; words past the last line of K are
    not written."""
    with kernel(f"bf16_activations_{k}_{terms}") as (func, ib):
        x = func.buffer("x", ("num_tokens", k), "float32")
        words = func.buffer("words", *bf16_activation_buffer(k, "num_tokens", terms))

        def emit(row: Any) -> None:
            def emit_line(line: Any, halves: list[Any]) -> None:
                for half, values in enumerate(halves):
                    for term in range(terms):
                        bits = _rounded(values)
                        high = T.Cast("uint16x16", T.shift_right(bits, splat(T.uint32(16))))
                        at = (line * terms + term) * PAIRS + half * (PAIRS // 2)
                        pairs = T.reinterpret("int32x8", high)
                        B.buffer_store(words, pairs, [row, ramp(at, PAIRS // 2)])
                        if term + 1 < terms:
                            kept = T.bitwise_and(bits, splat(T.uint32(0xFFFF0000)))
                            values = B.Bind(values - T.reinterpret("float32x16", kept))

            whole, rest = divmod(k, LINE)
            with B.serial(T.int64(whole)) as line:
                starts = (line * LINE, line * LINE + LANES)
                emit_line(line, [B.Bind(x[row, ramp(start)]) for start in starts])
            if rest:
                scratch = local_array(LINE)
                for start in (0, LANES):
                    B.buffer_store(scratch, constant(0.0), [ramp(start)])
                with B.serial(T.int64(rest)) as i:
                    B.buffer_store(scratch, x[row, T.int64(whole * LINE) + i], [i])
                emit_line(T.int64(whole), [B.Bind(scratch[ramp(s)]) for s in (0, LANES)])

        with body():
            for_rows(func.size("num_tokens"), k, emit)
    return ib.get()


def _rounded(values: Any) -> Any:
    """The bound bits of 16 float32, of which the upper 16 are the nearest bfloat16."""
    bits = B.Bind(T.reinterpret("uint32x16", values))
    last = T.bitwise_and(T.shift_right(bits, splat(T.uint32(16))), splat(T.uint32(1)))
    return B.Bind(bits + last + splat(T.uint32(_ROUND)))
