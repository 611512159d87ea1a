"""RMSNorm, and rows picked from a matrix."""

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
    launch,
    registers,
    store,
    strided,
)  # fmt: skip
from .limits import GpuLimits
from .reduce import sum_block


@kernel_factory
def rms_norm(size: int, epsilon: float, residual: bool, limits: GpuLimits) -> tirx.PrimFunc:
    """(x [rows, size], weight [size], (residual [rows, size])) → [rows, size], float32.

    A block of threads for each row.
    """
    threads = min(limits.max_threads, 256)
    while threads // 2 >= size:
        threads //= 2
    with kernel(f"rms_norm_{size}{'_add' if residual else ''}") as (k, ib):
        x = k.buffer("x", ("rows", size), "float32")
        weight = k.buffer("weight", (size,), "float32")
        added = k.buffer("residual", ("rows", size), "float32") if residual else None
        y = k.buffer("y", ("rows", size), "float32")
        with body(), launch([k.size("rows")], [threads]) as ((row,), (thread,)):
            total = registers(1)
            store(total, T.float32(0), 0)
            for i in strided(size, thread, threads):
                value = bind(x[row, i])
                store(total, total[0] + value * value, 0)
            squares = sum_block(total[0], thread, threads, limits.subgroup)
            mean = squares * T.float32(1.0 / size)
            inverse = bind(T.float32(1) / T.sqrt(mean + T.float32(epsilon)))
            for i in strided(size, thread, threads):
                value = x[row, i] * inverse * weight[i]
                store(y, value if added is None else added[row, i] + value, row, i)
    return ib.get()


@kernel_factory
def take_rows(size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """(x [m, size], rows [r] int32) → x[rows], float32. A thread for each element."""
    threads = min(limits.max_threads, 256)
    with kernel(f"take_rows_{size}") as (k, ib):
        x = k.buffer("x", ("num_tokens", size), "float32")
        rows = k.buffer("rows", ("num_rows",), "int32")
        y = k.buffer("y", ("num_rows", size), "float32")
        with body(), elements(k.size("num_rows") * size, threads) as at:
            row, column = bind(floor_div(at, size)), bind(floor_mod(at, size))
            store(y, x[rows[row], column], row, column)
    return ib.get()
