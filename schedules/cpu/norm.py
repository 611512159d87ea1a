"""RMSNorm and row gathering: memory-bound kernels, one row at a time."""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows, parallel
from .kernel import body, kernel, kernel_factory
from .vectors import constant, local_array, ramp, reduce_sum, splat, vector_width


@kernel_factory
def rms_norm(size: int, epsilon: float, residual: bool) -> tirx.PrimFunc:
    """(x [rows, size], weight [size], (residual [rows, size])) → [rows, size], float32.

    Rows in parallel when there are enough of them; the sum of squares in 16 lanes.
    """
    with kernel(f"rms_norm_{size}{'_add' if residual else ''}") as (k, ib):
        x = k.buffer("x", ("rows", size), "float32")
        weight = k.buffer("weight", (size,), "float32")
        added = k.buffer("residual", ("rows", size), "float32") if residual else None
        y = k.buffer("y", ("rows", size), "float32")
        with body():
            for_rows(
                k.size("rows"), size,
                lambda row: _norm_row(x, weight, added, y, row, size, epsilon),
            )  # fmt: skip
    return ib.get()


def _norm_row(x: Any, weight: Any, added: Any, y: Any, row: Any, size: int, epsilon: float) -> None:
    width = vector_width(size)
    squares = local_array(16)
    B.buffer_store(squares, constant(0.0), [ramp(0)])
    with B.serial(size // width) as i:
        value = B.Bind(x[row, ramp(i * width, width)])
        B.buffer_store(squares, squares[ramp(0, width)] + value * value, [ramp(0, width)])
    mean = reduce_sum(squares[ramp(0)]) * T.float32(1.0 / size)
    inverse = B.Bind(T.float32(1.0) / T.sqrt(mean + T.float32(epsilon)))
    with B.serial(size // width) as i:
        at = ramp(i * width, width)
        value = x[row, at] * splat(inverse, width) * weight[at]
        B.buffer_store(y, value if added is None else added[row, at] + value, [row, at])


@kernel_factory
def take_rows(size: int) -> tirx.PrimFunc:
    """(x [m, size], rows [r] int32) → x[rows], float32."""
    with kernel(f"take_rows_{size}") as (k, ib):
        x = k.buffer("x", ("num_tokens", size), "float32")
        rows = k.buffer("rows", ("num_rows",), "int32")
        y = k.buffer("y", ("num_rows", size), "float32")
        width = vector_width(size)
        with body(), parallel(k.size("num_rows")) as row, B.serial(size // width) as i:
            at = ramp(i * width, width)
            B.buffer_store(y, x[rows[row], at], [row, at])
    return ib.get()
