"""Linear layers with weights in any format.

    y = x Wᵀ (+ bias) (+ residual)      or      y = activation(x Wgᵀ (+ bg)) · (x Wuᵀ (+ bu))

Few rows of x go through `gemv` or `wide_gemv`, which read each weight once for some of them; more
go through `matrix_gemm` where the target has it, or `gemm`, which share tiles. On CPUs that act as
GPUs any number goes through `register_linear`. The host chooses by the number of rows.
"""

from collections.abc import Sequence
from dataclasses import replace

from tvm import tirx

from .gemm import emit_gemm
from .gemv import emit_gemv
from .half_rows import padded
from .kernel import Kernel, body, ceil_div, either, kernel, kernel_factory
from .limits import GemmTile, GpuLimits, MatrixTile
from .linear_operator import LinearArguments, LinearOperator
from .linear_schedule import LinearSchedule, default_schedule
from .matrix_gemm import (
    can_use_matrices,
    emit_matrix_gemm,
    emit_split_matrix_gemm,
    num_splits,
    workspace_size,
)
from .register_linear import emit_register_linear
from .row_parts import part_of, row_parts
from .weight import WeightReader
from .wide_gemv import emit_wide_gemv, has_wide_reads


@kernel_factory
def linear(
    operator: LinearOperator, limits: GpuLimits, schedule: LinearSchedule | None = None
) -> tirx.PrimFunc:
    """(x [m, K], (what `half_rows` makes of it, if `can_use_matrices`), for each weight its
    parts and its bias, (residual [m, N])) → ([m, N], (`workspace_size` floats)) float32.

    A weight in `row_parts` has all parts of its first rows, then of the next. `schedule` has the
    limits of each bucket of rows, which differ from `limits` in what shapes the work alone.
    """
    schedule = schedule or default_schedule(limits)
    with kernel(operator.name) as (k, ib):
        parts = declare(k, operator, limits, has_halves=can_use_matrices(operator, limits))
        if size := workspace_size(operator, schedule.many):
            workspace = k.buffer("workspace", (size,), "float32")
            for arguments in parts:
                arguments.workspace = workspace
        with body():
            for arguments in parts:
                _emit(arguments, schedule)
    return ib.get()


def _emit(arguments: LinearArguments, schedule: LinearSchedule) -> None:
    operator, rows, few = arguments.operator, arguments.rows, schedule.few

    def emit_few(limits: GpuLimits, tokens: int) -> None:
        if not limits.shares_memory:
            emit_register_linear(arguments, limits, tokens)
        elif has_wide_reads(operator.weights[0], limits):
            emit_wide_gemv(arguments, limits, tokens)
        else:
            emit_gemv(arguments, limits, tokens)

    def emit_many() -> None:
        limits = schedule.many
        if not limits.shares_memory:
            emit_register_linear(arguments, limits, limits.register_rows)
        elif can_use_matrices(operator, limits):
            _emit_matrix_tiles(arguments, limits, limits.matrix_tiles)
        else:
            _emit_tiles(arguments, limits.gemm_tiles)

    def emit_more_than_one() -> None:
        if few.gemv_rows == 1:
            emit_many()
            return
        either(rows <= few.gemv_rows, lambda: emit_few(few, few.gemv_tokens), emit_many)

    either(rows == 1, lambda: emit_few(schedule.one, 1), emit_more_than_one)


def declare(
    k: Kernel, operator: LinearOperator, limits: GpuLimits, *, has_halves: bool = False
) -> list[LinearArguments]:
    """The operator's tensors as arguments of a kernel, for each of the weights' `row_parts`."""
    n, parts = operator.n, row_parts(operator.weights, limits)
    x = k.buffer("x", ("num_rows", operator.k), "float32")
    x_half = scale = None
    if has_halves:
        x_half = k.buffer("x_half", ("num_rows", padded(operator.k)), "float16")
        scale = k.buffer("scale", ("num_rows",), "float32")
    readers: list[list[WeightReader]] = [[] for _ in parts]
    biases = []
    for i, weight in enumerate(operator.weights):
        for p, part in enumerate(parts):
            prefix = f"w{i}_part{p}_" if len(parts) > 1 else f"w{i}_"
            readers[p].append(part_of(weight, part).declare(k, prefix))
        biases.append(k.buffer(f"bias{i}", (n,), "float32") if operator.biases[i] else None)
    added = k.buffer("residual", ("num_rows", n), "float32") if operator.residual else None
    y = k.buffer("y", ("num_rows", n), "float32")
    rows = k.size("num_rows")
    return [
        LinearArguments(
            replace(operator, weights=tuple(reader.weight for reader in own)),
            x, own, biases, added, y, rows, x_half, scale, first_column=part.start,
        )
        for own, part in zip(readers, parts, strict=True)
    ]  # fmt: skip


def _emit_matrix_tiles(
    arguments: LinearArguments, limits: GpuLimits, tiles: Sequence[MatrixTile]
) -> None:
    first, *rest = tiles
    if not rest:
        emit_matrix_gemm(arguments, first, limits)
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
            lambda: emit_matrix_gemm(arguments, first, limits),
            lambda: emit_matrix_gemm(arguments, last, limits),
        )

    def emit_one_tile() -> None:
        if num_splits(arguments.operator, first) > 1:
            emit_split_matrix_gemm(arguments, first, limits)
        else:
            emit_matrix_gemm(arguments, first, limits)

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
