"""Logits changed in place from sparse lists: bias, penalties, and the tokens a grammar allows.

Names and arguments are those of the CPU's functions (`schedules/cpu/sampling_logits.py`), to which
are added the two that save logits from a list of places and put them back. An entry of a list names
its row; a list holds no (row, token) twice. A thread for each entry.
"""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from .kernel import (
    Kernel,
    bind,
    body,
    elements,
    floor_div,
    floor_mod,
    kernel,
    kernel_factory,
    minus_infinity,
    store,
)
from .limits import GpuLimits

_WORD_BITS = 32


def _threads(limits: GpuLimits) -> int:
    return min(limits.max_threads, 256)


def _logits(k: Kernel, vocab_size: int) -> Any:
    return k.buffer("logits", ("num_rows", vocab_size), "float32")


@kernel_factory
def apply_logit_bias_inplace(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """logits[rows[i], token_ids[i]] += logit_bias[i]; a bias of -inf forbids the token.

    logits [num_rows, vocab_size] float32, rows and token_ids [n] int32, logit_bias [n] float32.
    """
    with kernel("apply_logit_bias_inplace") as (k, ib):
        logits = _logits(k, vocab_size)
        rows = k.buffer("pos2seq_id", ("num_tokens",), "int32")
        token_ids = k.buffer("token_ids", ("num_tokens",), "int32")
        bias = k.buffer("logit_bias", ("num_tokens",), "float32")
        with body(), elements(k.size("num_tokens"), _threads(limits)) as i:
            row, token = bind(rows[i]), bind(token_ids[i])
            store(logits, logits[row, token] + bias[i], row, token)
    return ib.get()


@kernel_factory
def apply_penalty_inplace(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """Repetition, frequency and presence penalties of the tokens seen so far, in this order.

    logits [num_rows, vocab_size] float32. Entry i is a token of sequence s = pos2seq_id[i] that
    stands token_counts[i] times in its output, 0 if only in its prompt; sequence s has the logits
    of row seq_ids[s] and penalties[s] = (presence, frequency, repetition). Lists are int32,
    penalties [num_sequences, 3] float32.
    """
    with kernel("apply_penalty_inplace") as (k, ib):
        logits = _logits(k, vocab_size)
        seq_ids = k.buffer("seq_ids", ("num_sequences",), "int32")
        pos2seq_id = k.buffer("pos2seq_id", ("num_tokens",), "int32")
        token_ids = k.buffer("token_ids", ("num_tokens",), "int32")
        token_counts = k.buffer("token_cnt", ("num_tokens",), "int32")
        penalties = k.buffer("penalties", ("num_sequences", 3), "float32")
        with body(), elements(k.size("num_tokens"), _threads(limits)) as i:
            sequence = bind(pos2seq_id[i])
            row, token = bind(seq_ids[sequence]), bind(token_ids[i])
            presence, frequency, repetition = (bind(penalties[sequence, j]) for j in range(3))
            logit = bind(logits[row, token])
            count = bind(T.Cast("float32", token_counts[i]))
            repeated = T.Select(logit > T.float32(0), logit / repetition, logit * repetition)
            present = T.Select(count > T.float32(0), presence, T.float32(0))
            store(logits, repeated - frequency * count - present, row, token)
    return ib.get()


@kernel_factory
def apply_bitmask_inplace(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """Forbid (-inf) the tokens of row seq_ids[s] whose bit in bitmask[s] is 0.

    logits [num_rows, vocab_size] float32, seq_ids [n] int32, bitmask [n, ceil(vocab_size / 32)]
    int32; token t is bit t % 32, from the lowest, of word t // 32. A thread for each logit.
    """
    with kernel("apply_bitmask_inplace") as (k, ib):
        logits = _logits(k, vocab_size)
        seq_ids = k.buffer("seq_ids", ("num_sequences",), "int32")
        num_words = -(-vocab_size // _WORD_BITS)
        bitmask = k.buffer("bitmask", ("num_sequences", num_words), "int32")
        with body(), elements(k.size("num_sequences") * vocab_size, _threads(limits)) as at:
            sequence, token = bind(floor_div(at, vocab_size)), bind(floor_mod(at, vocab_size))
            word = bitmask[sequence, floor_div(token, _WORD_BITS)]
            bit = T.shift_right(word, floor_mod(token, _WORD_BITS))
            is_allowed = bind(T.bitwise_and(bit, T.int32(1)) != 0)
            row = bind(seq_ids[sequence])
            kept = T.Select(is_allowed, logits[row, token], minus_infinity())
            store(logits, kept, row, token)
    return ib.get()


@kernel_factory
def take_logits(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """(logits [num_rows, vocab_size], rows [n], token_ids [n]) → values [n] float32."""
    return _copy("take_logits", vocab_size, limits, is_put=False)


@kernel_factory
def put_logits(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """logits[rows[i], token_ids[i]] = values[i]: what `take_logits` took."""
    return _copy("put_logits", vocab_size, limits, is_put=True)


def _copy(name: str, vocab_size: int, limits: GpuLimits, *, is_put: bool) -> tirx.PrimFunc:
    with kernel(name) as (k, ib):
        logits = _logits(k, vocab_size)
        rows = k.buffer("rows", ("num_tokens",), "int32")
        token_ids = k.buffer("token_ids", ("num_tokens",), "int32")
        values = k.buffer("values", ("num_tokens",), "float32")
        with body(), elements(k.size("num_tokens"), _threads(limits)) as i:
            row, token = bind(rows[i]), bind(token_ids[i])
            if is_put:
                store(logits, values[i], row, token)
            else:
                store(values, logits[row, token], i)
    return ib.get()
