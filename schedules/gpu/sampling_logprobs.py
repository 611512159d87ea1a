"""What log probabilities are made of: the sum of exponentials of a row, and its highest logits."""

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .kernel import (
    bind,
    body,
    either,
    kernel,
    kernel_factory,
    launch,
    minus_infinity,
    not_a_number,
    registers,
    store,
    when,
)
from .limits import GpuLimits
from .sampling_row import RowBlock, logit_of, num_threads

NUM_PARTS = 4


@kernel_factory
def token_logprobs(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """The parts of log probabilities: those of token t are `logit(t) - highest - ln(sum)`.

    logits [num_rows, vocab_size] float32, of which the first num_ids (int32) ids count;
    rows [n] int32, and picks [n] int32: the token is token_ids[picks[i]], 0 if that is negative;
    token_ids [m] int32, as `sample_from_logits` leaves them;
    parts [n, 4] int32, the bits of: highest logit, float32, NaN if the logits are not numbers;
      Σ exp(logit - highest) in units of 2^-40, two uint32, the upper first; the token's logit;
    top_ids [n, num_top] int32 and top_logits float32: the most likely ids, highest first, and of
      equals the lowest id; -1 where there are not so many.

    A block of threads for each token; a pass over the row for each of its most likely ids.
    """
    threads = num_threads(limits)
    with kernel("token_logprobs") as (k, ib):
        logits = k.buffer("logits", ("num_rows", vocab_size), "float32")
        rows = k.buffer("rows", ("num_tokens",), "int32")
        picks = k.buffer("picks", ("num_tokens",), "int32")
        token_ids = k.buffer("token_ids", ("num_draws",), "int32")
        num_ids = k.scalar("num_ids", "int32")
        parts = k.buffer("parts", ("num_tokens", NUM_PARTS), "int32")
        top_ids = k.buffer("top_ids", ("num_tokens", "num_top"), "int32")
        top_logits = k.buffer("top_logits", ("num_tokens", "num_top"), "float32")
        num_top = k.size("num_top")

        def put_top(token: Any, i: Any, token_id: Any, logit: Any) -> None:
            with when(thread == 0):
                store(top_ids, token_id, token, i)
                store(top_logits, logit, token, i)

        def put_parts(token: Any, *values: Any) -> None:
            with when(thread == 0):
                for i, value in enumerate(values):
                    store(parts, value, token, i)

        def emit(row: RowBlock, token: Any, number: Any) -> None:
            inverse = T.float32(math.log2(math.e))
            total = row.total(lambda place: row.weight(place, inverse), lambda *_: T.bool(True))
            token_id = bind(T.max(token_ids[picks[token]], 0))
            values = (row.highest, total.high, total.low, logits[number, token_id])
            put_parts(token, *(T.reinterpret("int32", value) for value in values))
            place, last_id = registers(1, "uint32"), registers(1, "int32")
            store(place, row.highest_place, 0)
            store(last_id, row.highest_id, 0)
            with B.serial(num_top) as i:
                is_there = last_id[0] >= 0
                logit = T.Select(is_there, logit_of(bind(place[0])), minus_infinity())
                put_top(token, i, last_id[0], logit)
                after = row.next_highest(bind(place[0]), bind(last_id[0]))
                store(place, after[0], 0)
                store(last_id, after[1], 0)

        def emit_nothing(token: Any) -> None:
            nan = T.reinterpret("int32", not_a_number())
            put_parts(token, nan, T.int32(0), T.int32(0), nan)
            with B.serial(num_top) as i:
                put_top(token, i, T.int32(-1), minus_infinity())

        with body(), launch([k.size("num_tokens")], [threads]) as ((token,), (thread,)):
            number = bind(rows[token])
            row = RowBlock(logits, number, num_ids, thread=thread, threads=threads)
            row.find_highest()
            either(
                row.is_number,
                lambda: emit(row, token, number),
                lambda: emit_nothing(token),
            )
    return ib.get()
