"""Linear layers with weights in any format.

    y = x Wᵀ (+ bias) (+ residual)      or      y = activation(x Wgᵀ (+ bg)) · (x Wuᵀ (+ bu))

Few rows of x go through `gemv`, which reads each weight once for some of them; more go through
`gemm`, which shares tiles. The host chooses by the number of rows.
"""

from collections.abc import Sequence

from tvm import tirx

from .gemm import emit_gemm
from .gemv import emit_gemv
from .kernel import body, either, kernel, kernel_factory
from .limits import GemmTile, GpuLimits
from .linear_operator import LinearArguments, LinearOperator


@kernel_factory
def linear(operator: LinearOperator, limits: GpuLimits) -> tirx.PrimFunc:
    """(x [m, K], for each weight its parts and its bias, (residual [m, N])) → [m, N] float32."""
    n, inner = operator.n, operator.k
    with kernel(operator.name) as (k, ib):
        x = k.buffer("x", ("num_rows", inner), "float32")
        readers, biases = [], []
        for i, weight in enumerate(operator.weights):
            readers.append(weight.declare(k, f"w{i}_"))
            biases.append(k.buffer(f"bias{i}", (n,), "float32") if operator.biases[i] else None)
        added = k.buffer("residual", ("num_rows", n), "float32") if operator.residual else None
        y = k.buffer("y", ("num_rows", n), "float32")
        rows = k.size("num_rows")
        arguments = LinearArguments(operator, x, readers, biases, added, y, rows)
        few = limits.gemv_tokens
        with body():
            either(
                rows == 1,
                lambda: emit_gemv(arguments, limits, 1),
                lambda: either(
                    rows <= 2 * few,
                    lambda: emit_gemv(arguments, limits, few),
                    lambda: _emit_tiles(arguments, limits.gemm_tiles),
                ),
            )
    return ib.get()


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
