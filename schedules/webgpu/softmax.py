"""Logits to probabilities, in two kernels.

1. parts of a row: the largest logit and the sum of powers relative to it
2. the parts of a row merged by every thread; a thread for some elements of its part
"""

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from ..gpu.kernel import (
    bind,
    body,
    kernel,
    kernel_factory,
    launch,
    registers,
    share,
    store,
    when,
)
from ..gpu.limits import GpuLimits
from ..gpu.reduce import max_block, sum_block
from .block_size import row_threads

PARTS = 16
_LEAST = -3.0e38
_LEAST_TEMPERATURE = 1e-6


@kernel_factory
def softmax_with_temperature(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """(logits [b, 1, V], temperature [b]) → (probabilities like logits, a workspace [b, PARTS, 2]),
    float32. Temperatures below 1e-6 count as 1e-6."""
    threads = row_threads(limits)
    part_size = -(-vocab_size // PARTS)
    with kernel(f"softmax_{vocab_size}") as (k, ib):
        logits = k.buffer("logits", ("batch", 1, vocab_size), "float32")
        temperature = k.buffer("temperature", ("batch",), "float32")
        out = k.buffer("probs", ("batch", 1, vocab_size), "float32")
        found = k.buffer("parts", ("batch", PARTS, 2), "float32")
        batch = k.size("batch")

        def factor(row: Any) -> Any:
            least = T.float32(_LEAST_TEMPERATURE)
            return bind(T.float32(math.log2(math.e)) / T.max(temperature[row], least))

        def power(value: Any, largest: Any, scale: Any) -> Any:
            # Bounded, so that a masked logit makes no infinity.
            return T.exp2(
                T.max((T.max(value - largest, T.float32(-1e30))) * scale, T.float32(-150))
            )

        def part_bounds(part: Any) -> tuple[Any, Any]:
            first = bind(part * part_size)
            return first, bind(T.max(T.min(part_size, vocab_size - first), 0))

        with body():
            with launch([PARTS, batch], [threads]) as ((part, row), (thread,)):
                first, count = part_bounds(part)
                scale = factor(row)
                own = registers(1)
                store(own, T.float32(_LEAST), 0)
                with share(count, thread, threads) as i:
                    store(own, T.max(own[0], logits[row, 0, first + i]), 0)
                largest = max_block(own[0], thread, threads, limits.subgroup)
                store(own, T.float32(0), 0)
                with share(count, thread, threads) as i:
                    store(own, own[0] + power(logits[row, 0, first + i], largest, scale), 0)
                total = sum_block(own[0], thread, threads, limits.subgroup)
                with when(thread == 0):
                    store(found, largest, row, part, 0)
                    store(found, total, row, part, 1)
            with launch([PARTS, batch], [threads]) as ((part, row), (thread,)):
                first, count = part_bounds(part)
                scale = factor(row)
                largest_, total = registers(1), registers(1)
                store(largest_, T.float32(_LEAST), 0)
                store(total, T.float32(0), 0)
                with B.serial(PARTS) as p:
                    store(largest_, T.max(largest_[0], found[row, p, 0]), 0)
                largest = bind(largest_[0])
                with B.serial(PARTS) as p:
                    weight = power(found[row, p, 0], largest, scale)
                    store(total, total[0] + weight * found[row, p, 1], 0)
                inverse = bind(T.float32(1) / total[0])
                with share(count, thread, threads) as i:
                    value = power(logits[row, 0, first + i], largest, scale)
                    store(out, value * inverse, row, 0, first + i)
    return ib.get()
