"""What a request does to logits before they become probabilities, in place.

Names and arguments are those of MLC's model libraries.
"""

from tvm import tirx
from tvm.script import tirx as T

from ..gpu.kernel import (
    bind,
    body,
    elements,
    floor_div,
    floor_mod,
    kernel,
    kernel_factory,
    store,
    when,
)
from ..gpu.limits import GpuLimits

_MASKED = -3.0e38
"""Below every logit; finite, as GPUs need not know infinities."""


@kernel_factory
def apply_logit_bias(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """(logits [b, V], rows [n] int32, token_ids [n] int32, bias [n]): logits[row, token] += bias.
    No token comes twice in a row."""
    with kernel("apply_logit_bias_inplace") as (k, ib):
        logits = k.buffer("logits", ("batch", vocab_size), "float32")
        rows = k.buffer("rows", ("num_tokens",), "int32")
        token_ids = k.buffer("token_ids", ("num_tokens",), "int32")
        bias = k.buffer("bias", ("num_tokens",), "float32")
        with body(), elements(k.size("num_tokens"), min(limits.max_threads, 256)) as i:
            row, token = bind(rows[i]), bind(token_ids[i])
            store(logits, logits[row, token] + bias[i], row, token)
    return ib.get()


@kernel_factory
def apply_penalty(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """(logits [b, V], seq_ids [s] int32, rows [n] int32, token_ids [n] int32, counts [n] int32,
    penalties [s, 3]: presence, frequency, repetition); `rows` count in `seq_ids`.

    l ← l - presence - count · frequency, then divided by the repetition penalty where it is
    positive, else multiplied (OpenAI's two penalties; repetition: CTRL, Keskar et al., 2019).
    """
    with kernel("apply_penalty_inplace") as (k, ib):
        logits = k.buffer("logits", ("batch", vocab_size), "float32")
        seq_ids = k.buffer("seq_ids", ("num_sequences",), "int32")
        rows = k.buffer("rows", ("num_tokens",), "int32")
        token_ids = k.buffer("token_ids", ("num_tokens",), "int32")
        counts = k.buffer("counts", ("num_tokens",), "int32")
        penalties = k.buffer("penalties", ("num_sequences", 3), "float32")
        with body(), elements(k.size("num_tokens"), min(limits.max_threads, 256)) as i:
            sequence, token = bind(rows[i]), bind(token_ids[i])
            row = bind(seq_ids[sequence])
            presence, frequency = penalties[sequence, 0], penalties[sequence, 1]
            repetition = bind(penalties[sequence, 2])
            count = T.Cast("float32", counts[i])
            lowered = bind(logits[row, token] - (presence + count * frequency))
            is_negative = lowered < T.float32(0)
            value = T.Select(is_negative, lowered * repetition, lowered / repetition)
            store(logits, value, row, token)
    return ib.get()


@kernel_factory
def apply_bitmask(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """(logits [b, V], seq_ids [s] int32, bitmask [b, ceil(V / 32)] int32): in the rows `seq_ids`,
    tokens whose bit is not set become -3e38. Bit t % 32 of word t // 32 is token t's."""
    with kernel("apply_bitmask_inplace") as (k, ib):
        logits = k.buffer("logits", ("batch", vocab_size), "float32")
        seq_ids = k.buffer("seq_ids", ("num_sequences",), "int32")
        bitmask = k.buffer("bitmask", ("batch", -(-vocab_size // 32)), "int32")
        count = k.size("num_sequences") * vocab_size
        with body(), elements(count, min(limits.max_threads, 256)) as at:
            row = bind(seq_ids[floor_div(at, vocab_size)])
            token = bind(floor_mod(at, vocab_size))
            word = T.Cast("uint32", bitmask[row, floor_div(token, 32)])
            bit = T.shift_right(word, T.Cast("uint32", floor_mod(token, 32)))
            with when(T.bitwise_and(bit, T.uint32(1)) == T.uint32(0)):
                store(logits, T.float32(_MASKED), row, token)
    return ib.get()
