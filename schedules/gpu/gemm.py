"""Many rows times a weight: tiles of x and of decoded weights in shared memory.

block: [rows, columns] of y, over K in tiles of a few words
thread: some rows and columns of it in registers, spread so that neighbours read neighbours
"""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .kernel import (
    barrier,
    bind,
    ceil_div,
    floor_div,
    floor_mod,
    launch,
    load_vector,
    registers,
    shared,
    store,
    store_vector,
    strided,
    vector_width,
    when,
)
from .limits import GemmTile
from .linear_operator import LinearArguments
from .weight import WeightReader

_PAD = 4
"""Floats after each row of a shared tile, so that rows start in different banks."""


def emit_gemm(arguments: LinearArguments, tile: GemmTile) -> None:
    """Launch blocks over tiles of y."""
    operator = arguments.operator
    weight, count = operator.weights[0], len(operator.weights)
    steps = max(tile.depth // weight.step, 1)
    # Two weights share the registers and the shared memory of one.
    columns, thread_columns = tile.columns // count, max(tile.thread_columns // count, 1)
    across = columns // thread_columns
    threads = across * (tile.rows // tile.thread_rows)
    blocks = [-(-operator.n // columns), ceil_div(arguments.rows, tile.rows)]
    with launch(blocks, [threads]) as (block, (thread,)):
        _Block(
            arguments, steps, tile.rows, columns, tile.thread_rows, thread_columns, threads, thread,
            first_row=bind(block[1] * tile.rows), first_column=bind(block[0] * columns),
        ).emit(bind(floor_div(thread, across)), bind(floor_mod(thread, across)))  # fmt: skip


@dataclass(slots=True)
class _Block:
    """Emits what a thread does."""

    arguments: LinearArguments
    steps: int
    """Words along K of a tile."""
    rows: int
    columns: int
    own_rows: int
    own_columns: int
    num_threads: int
    thread: Any
    first_row: Any
    first_column: Any

    @property
    def depth(self) -> int:
        return self.steps * self.arguments.readers[0].weight.step

    @property
    def stride(self) -> int:
        """From row to row of a shared tile."""
        return self.depth + _PAD

    @property
    def width(self) -> int:
        """Of all vectors in shared memory."""
        return vector_width(self.arguments.readers[0].weight.step)

    def _sum(self, w: int, i: int, j: int) -> int:
        return (w * self.own_rows + i) * self.own_columns + j

    def emit(self, row: Any, column: Any) -> None:
        """`row` and `column` are the thread's first ones in the tile."""
        readers, weight = self.arguments.readers, self.arguments.readers[0].weight
        down, across = self.rows // self.own_rows, self.columns // self.own_columns
        x_tile = shared(self.rows * self.stride)
        w_tiles = [shared(self.columns * self.stride) for _ in readers]
        num_sums = len(readers) * self.own_rows * self.own_columns
        sums = registers(num_sums)
        for i in range(num_sums):
            store(sums, T.float32(0), i)
        with B.serial(-(-weight.num_steps // self.steps)) as turn:
            first_step = bind(turn * self.steps)
            self._load_inputs(x_tile, first_step)
            for reader, tile in zip(readers, w_tiles, strict=True):
                self._load_weight(reader, tile, first_step)
            barrier()
            with B.serial(self.depth // self.width) as part:
                at = bind(part * self.width)
                xs = [
                    load_vector(x_tile, (), (row + i * down) * self.stride + at, self.width)
                    for i in range(self.own_rows)
                ]
                for w, tile in enumerate(w_tiles):
                    for j in range(self.own_columns):
                        start = (column + j * across) * self.stride + at
                        values = load_vector(tile, (), start, self.width)
                        for i, x in enumerate(xs):
                            total = sums[self._sum(w, i, j)]
                            for a, b in zip(x, values, strict=True):
                                total = total + a * b
                            store(sums, total, self._sum(w, i, j))
            barrier()
        for i in range(self.own_rows):
            y_row = bind(self.first_row + row + i * down)
            for j in range(self.own_columns):
                y_column = bind(self.first_column + column + j * across)
                is_inside = T.And(y_row < self.arguments.rows, y_column < weight.n)
                with when(is_inside):
                    totals = [sums[self._sum(w, i, j)] for w in range(len(readers))]
                    self.arguments.finish(y_row, y_column, totals)

    def _load_inputs(self, tile: Any, first_step: Any) -> None:
        """The tile's part of x; beyond the last column zeros, beyond the last row the last one."""
        weight, x, width = self.arguments.readers[0].weight, self.arguments.x, self.width
        first = bind(first_step * weight.step)
        vectors = self.depth // width
        for at in strided(self.rows * vectors, self.thread, self.num_threads):
            i, vector = bind(floor_div(at, vectors)), bind(floor_mod(at, vectors))
            row = bind(T.min(self.first_row + i, self.arguments.rows - 1))
            column = bind(first + vector * width)
            if weight.k % width == 0:
                # All of a vector is inside, or nothing: then the first one is read instead.
                is_inside = bind(column < weight.k)
                inside = bind(T.Select(is_inside, column, 0))
                loaded = load_vector(x, (row,), inside, width)
                values = [bind(T.Select(is_inside, v, T.float32(0))) for v in loaded]
            else:
                values = [
                    bind(T.if_then_else(column + v < weight.k, x[row, column + v], T.float32(0)))
                    for v in range(width)
                ]
            store_vector(tile, values, i * self.stride + vector * width)

    def _load_weight(self, reader: WeightReader, tile: Any, first_step: Any) -> None:
        """The tile's part of a weight, decoded. Beyond the last row and step it is the last one: x
        is zero there, or y is not stored."""
        weight = reader.weight
        for at in strided(self.columns * self.steps, self.thread, self.num_threads):
            if weight.is_transposed:
                step, i = bind(floor_div(at, self.columns)), bind(floor_mod(at, self.columns))
            else:
                step, i = bind(floor_mod(at, self.steps)), bind(floor_div(at, self.steps))
            row = bind(T.min(self.first_column + i, weight.n - 1))
            inside = bind(T.min(first_step + step, weight.num_steps - 1))
            values = reader.values(row, inside)
            store_vector(tile, values, i * self.stride + step * weight.step)
