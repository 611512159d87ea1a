"""Linear layers with weights in any format.

    y = x Wᵀ (+ bias) (+ residual)      or      y = activation(x Wgᵀ (+ bg)) · (x Wuᵀ (+ bu))

Few rows of x go through `gemv` or `wide_gemv`, which read each weight once for some of them; more
go through `tensor_core_gemm` where the target has it, or `gemm`, which share tiles. The host
chooses by the number of rows.
"""

from collections.abc import Sequence

from tvm import tirx

from .gemm import emit_gemm
from .gemv import emit_gemv
from .half_rows import padded
from .kernel import Kernel, body, ceil_div, either, kernel, kernel_factory
from .limits import GemmTile, GpuLimits, MatrixTile
from .linear_operator import LinearArguments, LinearOperator
from .tensor_core_gemm import (
    can_use_tensor_cores,
    emit_split_tensor_core_gemm,
    emit_tensor_core_gemm,
    num_splits,
    workspace_size,
)
from .wide_gemv import emit_wide_gemv, has_wide_reads


@kernel_factory
def linear(operator: LinearOperator, limits: GpuLimits) -> tirx.PrimFunc:
    """(x [m, K], (what `half_rows` makes of it, if `can_use_tensor_cores`), for each weight its
    parts and its bias, (residual [m, N])) → ([m, N], (`workspace_size` floats)) float32."""
    has_halves = can_use_tensor_cores(operator, limits)
    with kernel(operator.name) as (k, ib):
        arguments = declare(k, operator, has_halves=has_halves)
        if size := workspace_size(operator, limits):
            arguments.workspace = k.buffer("workspace", (size,), "float32")
        rows = arguments.rows

        def emit_few(tokens: int) -> None:
            if has_wide_reads(operator.weights[0], limits):
                emit_wide_gemv(arguments, limits, tokens)
            else:
                emit_gemv(arguments, limits, tokens)

        def emit_many() -> None:
            if has_halves:
                _emit_matrix_tiles(arguments, limits, limits.matrix_tiles)
            else:
                _emit_tiles(arguments, limits.gemm_tiles)

        def emit_more_than_one() -> None:
            if limits.gemv_rows == 1:
                emit_many()
                return
            either(
                rows <= limits.gemv_rows,
                lambda: emit_few(limits.gemv_tokens),
                emit_many,
            )

        with body():
            either(rows == 1, lambda: emit_few(1), emit_more_than_one)
    return ib.get()


def declare(k: Kernel, operator: LinearOperator, *, has_halves: bool = False) -> LinearArguments:
    """The operator's tensors as arguments of a kernel."""
    n = operator.n
    x = k.buffer("x", ("num_rows", operator.k), "float32")
    x_half = scale = None
    if has_halves:
        x_half = k.buffer("x_half", ("num_rows", padded(operator.k)), "float16")
        scale = k.buffer("scale", ("num_rows",), "float32")
    readers, biases = [], []
    for i, weight in enumerate(operator.weights):
        readers.append(weight.declare(k, f"w{i}_"))
        biases.append(k.buffer(f"bias{i}", (n,), "float32") if operator.biases[i] else None)
    added = k.buffer("residual", ("num_rows", n), "float32") if operator.residual else None
    y = k.buffer("y", ("num_rows", n), "float32")
    rows = k.size("num_rows")
    return LinearArguments(operator, x, readers, biases, added, y, rows, x_half, scale)


def _emit_matrix_tiles(
    arguments: LinearArguments, limits: GpuLimits, tiles: Sequence[MatrixTile]
) -> None:
    first, *rest = tiles
    if not rest:
        emit_tensor_core_gemm(arguments, first)
        return

    def emit_others() -> None:
        if len(rest) > 1:
            _emit_matrix_tiles(arguments, limits, rest)
            return
        # More rows than the tile has, but too few for large tiles to fill the device?
        (last,) = rest
        columns = last.columns // len(arguments.operator.weights)
        across = -(-arguments.operator.n // columns)
        either(
            ceil_div(arguments.rows, last.rows) * across < limits.matrix_blocks,
            lambda: emit_tensor_core_gemm(arguments, first),
            lambda: emit_tensor_core_gemm(arguments, last),
        )

    def emit_one_tile() -> None:
        if num_splits(arguments.operator, first) > 1:
            emit_split_tensor_core_gemm(arguments, first, limits)
        else:
            emit_tensor_core_gemm(arguments, first)

    either(arguments.rows <= first.rows, emit_one_tile, emit_others)


def _emit_tiles(arguments: LinearArguments, tiles: Sequence[GemmTile]) -> None:
    first, *rest = tiles
    if not rest:
        emit_gemm(arguments, first)
        return
    either(
        arguments.rows <= first.rows,
        lambda: emit_gemm(arguments, first),
        lambda: _emit_tiles(arguments, rest),
    )
