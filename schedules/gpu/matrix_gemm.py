"""Many rows times a weight, by the target's matrix instructions.

Few rows make few tiles: then K is split among blocks as well, and a second kernel adds the sums.
"""

from tvm.script import tirx as T

from .half_weight import has_chunks
from .kernel import bind, ceil_div, elements, floor_div, floor_mod, launch
from .limits import GpuLimits, MatrixTile
from .linear_operator import LinearArguments, LinearOperator
from .simdgroup_gemm import SimdgroupBlock
from .tensor_core_gemm import TensorCoreBlock

_BLOCKS = {"tensor core": TensorCoreBlock, "simdgroup": SimdgroupBlock}
_SPLIT_BLOCKS, _SPLITS = 512, 16
"""How many blocks fill a device in small tiles, and the most parts of K."""


def can_use_matrices(operator: LinearOperator, limits: GpuLimits) -> bool:
    """Whether many rows are multiplied here, and not in float32 by `gemm`. Weights that are float32
    as a whole are meant to be exact."""
    weights = operator.weights
    is_float32 = any(w.format.bits is None and w.format.dtype == "float32" for w in weights)
    return bool(limits.matrix_tiles) and not is_float32 and all(map(has_chunks, weights))


def num_splits(operator: LinearOperator, tile: MatrixTile) -> int:
    """In how many parts K is summed side by side, where there are no more rows than a tile has: so
    many that all blocks together fill a device."""
    turns = -(-operator.k // tile.depth)
    return max(min(_SPLIT_BLOCKS // _num_across(operator, tile), _SPLITS, turns // 4), 1)


def workspace_size(operator: LinearOperator, limits: GpuLimits) -> int:
    """Floats in which blocks leave the sums of their parts of K; 0: there are no parts."""
    if not can_use_matrices(operator, limits):
        return 0
    sizes = [
        splits * len(operator.weights) * tile.rows * operator.n
        for tile in limits.matrix_tiles[:-1]
        if (splits := num_splits(operator, tile)) > 1
    ]
    return max(sizes, default=0)


def _num_across(operator: LinearOperator, tile: MatrixTile) -> int:
    """Tiles side by side."""
    return -(-operator.n // (tile.columns // len(operator.weights)))


def emit_matrix_gemm(arguments: LinearArguments, tile: MatrixTile, limits: GpuLimits) -> None:
    """Launch blocks over tiles of y, those of the same columns one after the other, so that the
    weight is read from memory once."""
    operator = arguments.operator
    columns = tile.columns // len(operator.weights)
    blocks = [ceil_div(arguments.rows, tile.rows), _num_across(operator, tile)]
    with launch(blocks, [tile.num_threads]) as (block, (thread,)):
        first_row, first_column = bind(block[0] * tile.rows), bind(block[1] * columns)
        kind = _BLOCKS[limits.matrix_unit]
        kind(arguments, tile, thread, first_row, first_column).emit()


def emit_split_matrix_gemm(arguments: LinearArguments, tile: MatrixTile, limits: GpuLimits) -> None:
    """The same for at most `tile.rows` rows, with K split among blocks; then their sums are put
    together, always in the same order."""
    operator = arguments.operator
    columns, splits = tile.columns // len(operator.weights), num_splits(operator, tile)
    with launch([splits, _num_across(operator, tile)], [tile.num_threads]) as (block, (thread,)):
        first_column, split = bind(block[1] * columns), (block[0], splits)
        kind = _BLOCKS[limits.matrix_unit]
        kind(arguments, tile, thread, T.int32(0), first_column, split).emit()
    n, count = operator.n, len(operator.weights)
    with elements(arguments.rows * n, min(limits.max_threads, 256)) as at:
        row, column = bind(floor_div(at, n)), bind(floor_mod(at, n))
        scale = bind(arguments.scale[row])
        totals = []
        for w in range(count):
            total = T.float32(0)
            for i in range(splits):
                place = ((i * count + w) * tile.rows + row) * n + column
                total = total + arguments.workspace[place]
            totals.append(total * scale)
        arguments.finish(row, column, totals)
