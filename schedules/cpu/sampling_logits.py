"""Logits changed in place from sparse lists: bias, penalties, and the tokens a grammar allows.

Names and arguments are those of MLC's model libraries. An entry of a list names its row; a list
holds no (row, token) twice, so that entries can be worked on in any order.
"""

import functools
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows
from .kernel import body, kernel
from .vectors import LANES, ramp, splat

_ENTRY_WORK = 8
"""An entry is a cache miss or two: so many elements of light work."""
_WORD_BITS = 32
_FORBIDDEN = float("-inf")


@functools.cache
def apply_logit_bias_inplace(vocab_size: int) -> tirx.PrimFunc:
    """logits[rows[i], token_ids[i]] += logit_bias[i]; a bias of -inf forbids the token.

    logits [num_rows, vocab_size] float32, rows and token_ids [n] int32, logit_bias [n] float32.
    """
    with kernel("apply_logit_bias_inplace") as (k, ib):
        logits = k.buffer("logits", ("num_rows", vocab_size), "float32")
        rows = k.buffer("pos2seq_id", ("num_tokens",), "int32")
        token_ids = k.buffer("token_ids", ("num_tokens",), "int32")
        bias = k.buffer("logit_bias", ("num_tokens",), "float32")

        def emit(i: Any) -> None:
            at = [rows[i], token_ids[i]]
            B.buffer_store(logits, logits[at[0], at[1]] + bias[i], at)

        with body():
            for_rows(k.size("num_tokens"), _ENTRY_WORK, emit)
    return ib.get()


@functools.cache
def apply_penalty_inplace(vocab_size: int) -> tirx.PrimFunc:
    """Repetition, frequency and presence penalties of the tokens seen so far, in this order.

    logits [num_rows, vocab_size] float32. Entry i is a token of sequence s = pos2seq_id[i] that
    stands token_counts[i] times in its output, 0 if only in its prompt; sequence s has the logits
    of row seq_ids[s] and penalties[s] = (presence, frequency, repetition). Lists are int32,
    penalties [num_sequences, 3] float32.
    """
    with kernel("apply_penalty_inplace") as (k, ib):
        logits = k.buffer("logits", ("num_rows", vocab_size), "float32")
        seq_ids = k.buffer("seq_ids", ("num_sequences",), "int32")
        pos2seq_id = k.buffer("pos2seq_id", ("num_tokens",), "int32")
        token_ids = k.buffer("token_ids", ("num_tokens",), "int32")
        token_counts = k.buffer("token_cnt", ("num_tokens",), "int32")
        penalties = k.buffer("penalties", ("num_sequences", 3), "float32")

        def emit(i: Any) -> None:
            sequence = B.Bind(pos2seq_id[i])
            at = [B.Bind(seq_ids[sequence]), B.Bind(token_ids[i])]
            presence, frequency, repetition = (B.Bind(penalties[sequence, j]) for j in range(3))
            logit = B.Bind(logits[at[0], at[1]])
            count = B.Bind(T.Cast("float32", token_counts[i]))
            repeated = T.Select(logit > T.float32(0), logit / repetition, logit * repetition)
            present = T.Select(count > T.float32(0), presence, T.float32(0))
            B.buffer_store(logits, repeated - frequency * count - present, at)

        with body():
            for_rows(k.size("num_tokens"), _ENTRY_WORK, emit)
    return ib.get()


@functools.cache
def apply_bitmask_inplace(vocab_size: int) -> tirx.PrimFunc:
    """Forbid (-inf) the tokens of row seq_ids[s] whose bit in bitmask[s] is 0.

    logits [num_rows, vocab_size] float32, seq_ids [n] int32, bitmask [n, ceil(vocab_size / 32)]
    int32; token t is bit t % 32, from the lowest, of word t // 32.
    """
    num_words = -(-vocab_size // _WORD_BITS)
    with kernel("apply_bitmask_inplace") as (k, ib):
        logits = k.buffer("logits", ("num_rows", vocab_size), "float32")
        seq_ids = k.buffer("seq_ids", ("num_sequences",), "int32")
        bitmask = k.buffer("bitmask", ("num_sequences", num_words), "int32")

        def emit(s: Any) -> None:
            row = B.Bind(seq_ids[s])
            with B.serial(T.int64(vocab_size // LANES)) as i:
                word = bitmask[s, i * LANES // _WORD_BITS] >> T.Cast("int32", i % 2 * LANES)
                bits = splat(B.Bind(word)) >> ramp(T.int32(0))
                _keep(logits, row, ramp(i * LANES), bits, LANES)
            for token in range(vocab_size - vocab_size % LANES, vocab_size):
                bit = bitmask[s, token // _WORD_BITS] >> T.int32(token % _WORD_BITS)
                _keep(logits, row, token, bit, 1)

        with body():
            for_rows(k.size("num_sequences"), vocab_size, emit)
    return ib.get()


def _keep(logits: Any, row: Any, at: Any, bits: Any, width: int) -> None:
    """Forbid the tokens at `at` whose lowest bit is 0."""
    is_allowed = (bits & splat(T.int32(1), width)) != splat(T.int32(0), width)
    kept = T.Select(is_allowed, logits[row, at], splat(T.float32(_FORBIDDEN), width))
    B.buffer_store(logits, kept, [row, at])
