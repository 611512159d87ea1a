"""Many rows times a weight on NVIDIA's tensor cores: `mma.sync` of 16 x 8 x 16.

    x, as halves:   memory → (cp.async) shared memory → (ldmatrix) registers
    the weight:     memory → registers, decoded → shared memory → (ldmatrix) registers

Rows of a tile in shared memory are not padded. Their chunks of 16 bytes are permuted by the row, so
that eight rows' chunks, which go together to ldmatrix and come together from the threads, lie in
different banks.
"""

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from . import cuda_instructions
from .cuda_instructions import commit_copies, copy_async, load_matrices, multiply, wait_for_copies
from .half_weight import CHUNK, HalfInstructions
from .kernel import bind, floor_div, floor_mod, registers, store, when
from .matrix_block import MatrixBlock, Pending

_M, _N, _K = 16, 8, 16
"""Of the instruction: rows of x, columns of y, and what they are summed over."""


class TensorCoreBlock(MatrixBlock):
    """Emits what a thread does."""

    __slots__ = ()

    @property
    def instructions(self) -> HalfInstructions:
        return cuda_instructions

    # ---- loads

    def place(self, row: Any, chunk: Any) -> Any:
        by = floor_mod(row, 8) if self.chunks == 8 else floor_mod(floor_div(row, 2), 4)
        return row * self.tile.depth + T.bitwise_xor(chunk, by) * CHUNK

    def copy(self, tile: Any, at: Any, source: Any, row: Any, column: Any) -> Pending | None:
        copy_async(tile, at, source, row, column)
        return None

    def store_halves(self, tile: Any, at: Any, words: Sequence[Any]) -> None:
        cuda_instructions.store_halves(tile, at, words)

    def wait_for_copies(self) -> None:
        commit_copies()
        wait_for_copies()

    # ---- products

    def zeros(self) -> Any:
        count = self.tile.warp_rows * self.tile.warp_columns // 32
        sums = registers(count)
        for i in range(count):
            store(sums, T.float32(0), i)
        return sums

    def multiply(self, x_tile: Any, x_start: Any, w_tile: Any, w_start: Any, sums: Any) -> None:
        down, across = self.tile.warp_rows // _M, self.tile.warp_columns // _N
        first_row, first_column = self.warp_start()
        lane = bind(floor_mod(self.thread, 32))
        # Four matrices of 8 x 8 at a time: of x two below each other, then two beside those; of
        # the weight two beside each other, then two below.
        x_row = bind(first_row + floor_mod(lane, 16))
        w_row = bind(first_column + floor_mod(lane, 8) + floor_div(lane, 16) * 8)
        x_chunk, w_chunk = bind(floor_div(lane, 16)), bind(floor_mod(floor_div(lane, 8), 2))
        xs, ws = registers(4 * down, "uint32"), registers(2 * across, "uint32")
        for part in range(self.tile.depth // _K):
            for i in range(down):
                at = x_start + self.place(x_row + i * _M, x_chunk + 2 * part)
                load_matrices(xs, 4 * i, x_tile, at)
            for j in range(0, across, 2):
                at = w_start + self.place(w_row + j * _N, w_chunk + 2 * part)
                load_matrices(ws, 2 * j, w_tile, at)
            for i in range(down):
                a = [xs[4 * i + r] for r in range(4)]
                for j in range(across):
                    multiply(sums, 4 * (i * across + j), a, [ws[2 * j], ws[2 * j + 1]])

    # ---- results

    def store(self, sums: Any) -> None:
        """A thread has, of each 16 x 8, two neighbours in each of two rows."""
        across = self.tile.warp_columns // _N
        first_row, first_column = self.warp_start()
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
                            for v, of_weights in enumerate(totals):
                                self.store_part(row, column + v, of_weights)
                        else:
                            scaled = [[total * scale for total in both] for both in totals]
                            self._store_pair(row, column, scaled)

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
