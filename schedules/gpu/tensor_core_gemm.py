"""Many rows times a weight on NVIDIA's tensor cores: halves times halves, sums in float32.

    block: [rows, columns] of y, over K in tiles of `depth`, two stages in shared memory
    warp:  some rows and columns of it in registers, by `mma.sync` of 16 x 8 x 16

    x, as halves:   memory → (cp.async) shared memory → (ldmatrix) registers
    the weight:     memory → registers, decoded → shared memory → (ldmatrix) registers

While a tile is multiplied, the next one's loads are under way; a weight is decoded after that, into
the other stage, so that there is one barrier a tile. Two weights (a gated MLP) lie side by side in
the tile by eights: a warp holds the same columns of both, and the activation is applied in
registers.

Few rows make few tiles: then K is split among blocks as well, and a second kernel adds the sums.

Rows of a tile in shared memory are not padded. Their chunks of 16 bytes are permuted by the row, so
that eight rows' chunks, which go together to ldmatrix and come together from the threads, lie in
different banks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .cuda_instructions import (
    commit_copies,
    copy_async,
    load_matrices,
    multiply,
    store_halves,
    wait_for_copies,
)
from .half_weight import CHUNK, HalfReader, has_chunks
from .kernel import (
    barrier,
    bind,
    ceil_div,
    elements,
    floor_div,
    floor_mod,
    launch,
    registers,
    shared,
    store,
    when,
)
from .limits import GpuLimits, MatrixTile
from .linear_operator import LinearArguments, LinearOperator

_M, _N, _K = 16, 8, 16
"""Of the instruction: rows of x, columns of y, and what they are summed over."""
_SPLIT_BLOCKS, _SPLITS = 512, 16
"""How many blocks fill a device in small tiles, and the most parts of K."""


def can_use_tensor_cores(operator: LinearOperator, limits: GpuLimits) -> bool:
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
    if not can_use_tensor_cores(operator, limits):
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


def emit_tensor_core_gemm(arguments: LinearArguments, tile: MatrixTile) -> None:
    """Launch blocks over tiles of y, those of the same columns one after the other, so that the
    weight is read from memory once."""
    operator = arguments.operator
    columns = tile.columns // len(operator.weights)
    blocks = [ceil_div(arguments.rows, tile.rows), _num_across(operator, tile)]
    with launch(blocks, [tile.num_threads]) as (block, (thread,)):
        first_row, first_column = bind(block[0] * tile.rows), bind(block[1] * columns)
        _Block(arguments, tile, thread, first_row, first_column).emit()


def emit_split_tensor_core_gemm(
    arguments: LinearArguments, tile: MatrixTile, limits: GpuLimits
) -> None:
    """The same for at most `tile.rows` rows, with K split among blocks; then their sums are put
    together, always in the same order."""
    operator = arguments.operator
    columns, splits = tile.columns // len(operator.weights), num_splits(operator, tile)
    with launch([splits, _num_across(operator, tile)], [tile.num_threads]) as (block, (thread,)):
        split = (block[0], splits)
        _Block(arguments, tile, thread, T.int32(0), bind(block[1] * columns), split).emit()
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


@dataclass(slots=True)
class _Block:
    """Emits what a thread does."""

    arguments: LinearArguments
    tile: MatrixTile
    thread: Any
    first_row: Any
    first_column: Any
    split: tuple[Any, int] | None = None
    """Which of how many parts of K; None: all."""

    @property
    def count(self) -> int:
        """Weights."""
        return len(self.arguments.readers)

    @property
    def chunks(self) -> int:
        """Of a row of a tile."""
        return self.tile.depth // CHUNK

    def emit(self) -> None:
        tile = self.tile
        readers = [HalfReader(reader) for reader in self.arguments.readers]
        x_size, w_size = tile.rows * tile.depth, tile.columns * tile.depth
        x_tile, w_tile = shared(2 * x_size, "float16"), shared(2 * w_size, "float16")
        num_sums = tile.warp_rows * tile.warp_columns // 32
        sums = registers(num_sums)
        for i in range(num_sums):
            store(sums, T.float32(0), i)
        turns = -(-self.arguments.operator.k // tile.depth)
        start, end = T.int32(0), T.int32(turns)
        if self.split is not None:
            part, splits = self.split
            start = bind(floor_div(part * turns, splits))
            end = bind(floor_div((part + 1) * turns, splits))

        def load(turn: Any, stage: Any) -> list[Any]:
            """Start a tile's loads."""
            first_chunk = bind(turn * self.chunks)
            self._copy_inputs(x_tile, bind(stage * x_size), first_chunk)
            return [
                self._load_weight(reader, w, w_tile, bind(stage * w_size), first_chunk)
                for w, reader in enumerate(readers)
            ]

        def finish(loaded: list[Any]) -> None:
            for reader, parts in zip(readers, loaded, strict=True):
                for at, part in parts:
                    store_halves(w_tile, at, reader.decode(part))
            commit_copies()
            wait_for_copies()
            barrier()

        finish(load(start, T.int32(0)))
        with B.serial(turns if self.split is None else bind(end - start)) as turn:
            stage = bind(floor_mod(turn, 2))
            # After the last tile that one again, into the stage that nobody reads.
            loaded = load(bind(T.min(start + turn + 1, end - 1)), bind(1 - stage))
            self._multiply(x_tile, bind(stage * x_size), w_tile, bind(stage * w_size), sums)
            finish(loaded)
        self._store(sums)

    # ---- loads

    def _place(self, row: Any, chunk: Any) -> Any:
        """Where a chunk of a tile's row lies in shared memory."""
        by = floor_mod(row, 8) if self.chunks == 8 else floor_mod(floor_div(row, 2), 4)
        return row * self.tile.depth + T.bitwise_xor(chunk, by) * CHUNK

    def _own_chunks(self, rows: int, *, is_transposed: bool = False) -> list[tuple[Any, Any]]:
        """(row, chunk) of a tile that are this thread's. Neighbours in memory, which are rows or
        chunks, are those of neighbours."""
        threads, own = self.tile.num_threads, []
        for turn in range(rows * self.chunks // threads):
            at = bind(self.thread + turn * threads) if turn else self.thread
            if is_transposed:
                chunk, row = bind(floor_div(at, rows)), bind(floor_mod(at, rows))
            else:
                row, chunk = bind(floor_div(at, self.chunks)), bind(floor_mod(at, self.chunks))
            own.append((row, chunk))
        return own

    def _copy_inputs(self, tile: Any, start: Any, first_chunk: Any) -> None:
        """The tile's part of x; beyond the last row, the last one."""
        last_row = self.arguments.rows - 1
        for i, chunk in self._own_chunks(self.tile.rows):
            row = bind(T.min(self.first_row + i, last_row))
            at = start + self._place(i, chunk)
            copy_async(tile, at, self.arguments.x_half, row, (first_chunk + chunk) * CHUNK)

    def _load_weight(
        self, reader: HalfReader, w: int, tile: Any, start: Any, first_chunk: Any
    ) -> list[tuple[Any, Sequence[Any]]]:
        """The tile's part of weight number w: (where it goes, what is to be decoded) …  Beyond the
        last row and chunk it is the last one: y is not stored, or x is zero there."""
        weight = reader.reader.weight
        loaded = []
        own = self._own_chunks(self.tile.columns // self.count, is_transposed=weight.is_transposed)
        for i, chunk in own:
            row = bind(T.min(self.first_column + i, weight.n - 1))
            inside = bind(T.min(first_chunk + chunk, reader.num_chunks - 1))
            in_tile = i
            if self.count > 1:  # the weights take turns, eight rows each
                in_tile = bind(i + floor_div(i, _N) * ((self.count - 1) * _N) + w * _N)
            at = bind(start + self._place(in_tile, chunk))
            if reader.is_copied:
                copy_async(tile, at, reader.reader.parts["weight"], row, inside * CHUNK)
            else:
                loaded.append((at, reader.load(row, inside)))
        return loaded

    # ---- products

    def _warp_start(self) -> tuple[Any, Any]:
        """The first row and column of the thread's warp in the tile."""
        across = self.tile.columns // self.tile.warp_columns
        warp = bind(floor_div(self.thread, 32))
        row, column = floor_div(warp, across), floor_mod(warp, across)
        return bind(row * self.tile.warp_rows), bind(column * self.tile.warp_columns)

    def _multiply(self, x_tile: Any, x_start: Any, w_tile: Any, w_start: Any, sums: Any) -> None:
        down, across = self.tile.warp_rows // _M, self.tile.warp_columns // _N
        first_row, first_column = self._warp_start()
        lane = bind(floor_mod(self.thread, 32))
        # Four matrices of 8 x 8 at a time: of x two below each other, then two beside those; of
        # the weight two beside each other, then two below.
        x_row = bind(first_row + floor_mod(lane, 16))
        w_row = bind(first_column + floor_mod(lane, 8) + floor_div(lane, 16) * 8)
        x_chunk, w_chunk = bind(floor_div(lane, 16)), bind(floor_mod(floor_div(lane, 8), 2))
        xs, ws = registers(4 * down, "uint32"), registers(2 * across, "uint32")
        for part in range(self.tile.depth // _K):
            for i in range(down):
                at = x_start + self._place(x_row + i * _M, x_chunk + 2 * part)
                load_matrices(xs, 4 * i, x_tile, at)
            for j in range(0, across, 2):
                at = w_start + self._place(w_row + j * _N, w_chunk + 2 * part)
                load_matrices(ws, 2 * j, w_tile, at)
            for i in range(down):
                a = [xs[4 * i + r] for r in range(4)]
                for j in range(across):
                    multiply(sums, 4 * (i * across + j), a, [ws[2 * j], ws[2 * j + 1]])

    # ---- results

    def _store(self, sums: Any) -> None:
        """A thread has, of each 16 x 8, two neighbours in each of two rows."""
        across = self.tile.warp_columns // _N
        first_row, first_column = self._warp_start()
        lane = bind(floor_mod(self.thread, 32))
        rows = self.arguments.rows
        for i in range(self.tile.warp_rows // _M):
            for half in range(2):
                below = i * _M + half * 8
                row = bind(self.first_row + first_row + floor_div(lane, 4) + below)
                with when(row < rows):
                    scale = None if self.split else bind(self.arguments.scale[row])
                    for j in range(across // self.count):
                        column = bind(
                            self.first_column + floor_div(first_column, self.count)
                            + (j * _N + floor_mod(lane, 4) * 2)
                        )  # fmt: skip
                        first = 4 * (i * across + j * self.count) + 2 * half
                        totals = [
                            [sums[first + 4 * w + v] for w in range(self.count)] for v in range(2)
                        ]
                        if scale is None:
                            self._store_part(row, column, totals)
                        else:
                            scaled = [[total * scale for total in both] for both in totals]
                            self._store_pair(row, column, scaled)

    def _store_part(self, row: Any, column: Any, totals: Sequence[Sequence[Any]]) -> None:
        """Into the workspace [split, weight, row, column]."""
        assert self.split is not None
        n, rows = self.arguments.operator.n, self.tile.rows
        for v, of_weights in enumerate(totals):
            with when(column + v < n):
                for w, total in enumerate(of_weights):
                    at = ((self.split[0] * self.count + w) * rows + row) * n + column + v
                    store(self.arguments.workspace, total, at)

    def _store_pair(self, row: Any, column: Any, totals: Sequence[Sequence[Any]]) -> None:
        arguments, n = self.arguments, self.arguments.operator.n
        if n % 2:
            for v, of_weights in enumerate(totals):
                with when(column + v < n):
                    arguments.finish(row, column + v, of_weights)
            return
        with when(column < n):
            values = [
                bind(arguments.value(row, column + v, of_weights))
                for v, of_weights in enumerate(totals)
            ]
            store(arguments.y, T.Shuffle(values, [0, 1]), row, T.ramp(column, 1, 2))
