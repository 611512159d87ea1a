"""Rows of a table, decoded."""

from typing import Any

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
from .row_parts import part_of, row_parts
from .weight import GpuWeight, WeightReader


@kernel_factory
def embedding(table: GpuWeight, scale: float, limits: GpuLimits) -> tirx.PrimFunc:
    """(ids [m] int32, for each of the table's `row_parts` its tensors) → its rows times `scale`,
    [m, K] float32.

    A thread for each word of each row; of a table in parts, a launch for the rows of each.
    """
    steps = table.num_steps
    parts = row_parts((table,), limits)
    with kernel(f"embedding_{table.key}") as (k, ib):
        ids = k.buffer("ids", ("num_tokens",), "int32")
        readers = [part_of(table, rows).declare(k, f"part{i}_") for i, rows in enumerate(parts)]
        y = k.buffer("y", ("num_tokens", table.k), "float32")
        threads = min(limits.max_threads, 256)

        def copy(reader: WeightReader, token: Any, row: Any, step: Any) -> None:
            first = bind(step * table.step)
            for i, value in enumerate(reader.values(row, step)):
                if table.has_padding:
                    with when(first + i < table.k):
                        store(y, value * T.float32(scale), token, first + i)
                else:
                    store(y, value * T.float32(scale), token, first + i)

        with body():
            for reader, rows in zip(readers, parts, strict=True):
                with elements(k.size("num_tokens") * steps, threads) as at:
                    token, step = bind(floor_div(at, steps)), bind(floor_mod(at, steps))
                    if len(parts) == 1:
                        copy(reader, token, ids[token], step)
                        continue
                    row = bind(ids[token] - rows.start)
                    with when(T.And(row >= 0, row < len(rows))):
                        copy(reader, token, row, step)
    return ib.get()
