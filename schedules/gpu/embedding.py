"""Rows of a table, decoded."""

from tvm import tirx
from tvm.script import tirx as T

from .kernel import (
    bind,
    body,
    elements,
    floor_div,
    floor_mod,
    kernel,
    kernel_factory,
    store,
    when,
)  # fmt: skip
from .limits import GpuLimits
from .weight import GpuWeight


@kernel_factory
def embedding(table: GpuWeight, scale: float, limits: GpuLimits) -> tirx.PrimFunc:
    """(ids [m] int32, parts of the table) → its rows times `scale`, [m, K] float32.

    A thread for each word of each row.
    """
    steps = table.num_steps
    with kernel(f"embedding_{table.key}") as (k, ib):
        ids = k.buffer("ids", ("num_tokens",), "int32")
        reader = table.declare(k)
        y = k.buffer("y", ("num_tokens", table.k), "float32")
        threads = min(limits.max_threads, 256)
        with body(), elements(k.size("num_tokens") * steps, threads) as at:
            token, step = bind(floor_div(at, steps)), bind(floor_mod(at, steps))
            first = bind(step * table.step)
            for i, value in enumerate(reader.values(ids[token], step)):
                if table.has_padding:
                    with when(first + i < table.k):
                        store(y, value * T.float32(scale), token, first + i)
                else:
                    store(y, value * T.float32(scale), token, first + i)
    return ib.get()
