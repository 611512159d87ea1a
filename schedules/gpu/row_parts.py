"""Weights that are larger than what a device binds at once: rows of them, in tensors of their own.

All tensors of a weight are cut at the same rows. Each part goes through kernels of its own, which
write their columns of the result (of an embedding, their tokens).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from ...artifact.dtypes import numpy_dtype
from ...artifact.errors import CompileError
from .limits import GpuLimits
from .weight import GpuWeight

_ALIGNMENT = 64
"""Rows: so that every part starts on a multiple of 64 bytes, as whole tensors do."""


def row_parts(weights: Sequence[GpuWeight], limits: GpuLimits) -> tuple[range, ...]:
    """The rows of each part of these weights of one shape; one part of all where they fit.

    CompileError for a weight that cannot be cut.
    """
    n, k = weights[0].n, weights[0].k
    row_bytes = max(
        math.prod(shape) * numpy_dtype(dtype).itemsize // n
        for weight in weights
        for shape, dtype in weight.format.parts(n, k).values()
    )
    limit = limits.max_weight_bytes
    if limit is None or n * row_bytes <= limit:
        return (range(n),)
    if any(weight.is_transposed for weight in weights):
        raise CompileError(
            f"a weight of {n * row_bytes >> 20} MB is stored K x N, which cannot be cut into parts "
            f"of at most {limit >> 20} MB for this target; choose another quantization, as q4f16_1"
        )
    most = limit // row_bytes // _ALIGNMENT * _ALIGNMENT
    if most == 0:
        raise CompileError(
            f"{_ALIGNMENT} rows of a weight take {_ALIGNMENT * row_bytes} bytes, more than the "
            f"{limit} that this target binds; choose a quantization with fewer bits"
        )
    even = -(-n // -(-n // most))
    size = even + -even % _ALIGNMENT
    return tuple(range(start, min(start + size, n)) for start in range(0, n, size))


def part_of(weight: GpuWeight, rows: range) -> GpuWeight:
    """Those rows, as a weight."""
    return replace(weight, n=len(rows))
