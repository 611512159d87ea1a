"""Many rows times a weight on Apple's GPUs: `simdgroup_multiply_accumulate` of 8 x 8 x 8.

    x, as halves:   memory → registers → threadgroup memory → (simdgroup_load) matrices
    the weight:     memory → registers, decoded → threadgroup memory → (simdgroup_load) matrices
    sums:           matrices → (simdgroup_store) threadgroup memory → registers, finished → memory

There since Apple's family 7 (M1, A14) and Metal 2.3. Which lanes hold which elements of a matrix is
not documented, so that sums go through memory before anything is done to them one by one.

A tile in threadgroup memory is made of 8 x 8 matrices, each of them 128 bytes in one piece.
"""

from collections.abc import Sequence
from typing import Any

from tvm.backend.metal.op import (
    make_filled_simdgroup_matrix,
    simdgroup_load,
    simdgroup_multiply_accumulate,
    simdgroup_store,
)
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from . import metal_instructions
from .half_weight import CHUNK, HalfInstructions
from .kernel import bind, floor_div, floor_mod, shared, strided, when
from .matrix_block import EIGHT, MatrixBlock, Pending

_SIZE = EIGHT * EIGHT
_LANES = 32


class SimdgroupBlock(MatrixBlock):
    """Emits what a thread does."""

    __slots__ = ()

    @property
    def instructions(self) -> HalfInstructions:
        return metal_instructions

    # ---- loads

    def place(self, row: Any, chunk: Any) -> Any:
        matrix = floor_div(row, EIGHT) * self.chunks + chunk
        return matrix * _SIZE + floor_mod(row, EIGHT) * CHUNK

    def copy(self, tile: Any, at: Any, source: Any, row: Any, column: Any) -> Pending | None:
        return Pending(tile, at, metal_instructions.load_halves(source, row, bind(column)))

    def store_halves(self, tile: Any, at: Any, words: Sequence[Any]) -> None:
        metal_instructions.store_halves(tile, at, words)

    def wait_for_copies(self) -> None:
        """They go through registers: nothing is under way."""

    # ---- products

    def zeros(self) -> Any:
        count = self._down * self._across
        sums = _matrices(count, "float32")
        for i in range(count):
            B.evaluate(make_filled_simdgroup_matrix(sums.data, i, T.float32(0)))
        return sums

    @property
    def _down(self) -> int:
        """Matrices of a warp, below each other and side by side."""
        return self.tile.warp_rows // EIGHT

    @property
    def _across(self) -> int:
        return self.tile.warp_columns // EIGHT

    def multiply(self, x_tile: Any, x_start: Any, w_tile: Any, w_start: Any, sums: Any) -> None:
        first_row, first_column = self.warp_start()
        xs, ws = _matrices(self._down, "float16"), _matrices(self._across, "float16")
        for part in range(self.chunks):
            for i in range(self._down):
                at = x_start + self.place(first_row + i * EIGHT, part)
                _load(xs, i, x_tile, at)
            for j in range(self._across):
                at = w_start + self.place(first_column + j * EIGHT, part)
                _load(ws, j, w_tile, at, is_transposed=True)
            for i in range(self._down):
                for j in range(self._across):
                    c = i * self._across + j
                    B.evaluate(
                        simdgroup_multiply_accumulate(
                            sums.data, c, xs.data, i, ws.data, j, sums.data, c
                        )
                    )

    # ---- results

    def store(self, sums: Any) -> None:
        """Eight rows of a warp at a time, through memory of its own."""
        columns = self.tile.warp_columns
        first_row, first_column = self.warp_start()
        lane, warp = bind(floor_mod(self.thread, _LANES)), bind(floor_div(self.thread, _LANES))
        rows, own_columns = self.arguments.rows, columns // self.count
        band = shared(self.tile.num_threads // _LANES * EIGHT * columns)
        start = bind(warp * (EIGHT * columns))
        for i in range(self._down):
            if i:
                _warp_barrier()  # the rows before have been read
            for j in range(self._across):
                to = T.address_of(band[start + j * EIGHT])
                c = i * self._across + j
                B.evaluate(simdgroup_store(sums.data, c, to, columns))
            _warp_barrier()
            for at in strided(EIGHT * own_columns, lane, _LANES):
                r, c = bind(floor_div(at, own_columns)), bind(floor_mod(at, own_columns))
                row = bind(self.first_row + first_row + (i * EIGHT) + r)
                column = bind(self.first_column + floor_div(first_column, self.count) + c)
                # The weights take turns, eight columns each.
                in_band = bind(start + r * columns + c + floor_div(c, EIGHT) * self._turns)
                totals = [bind(band[in_band + w * EIGHT]) for w in range(self.count)]
                with when(row < rows):
                    self._store_one(row, column, totals)

    @property
    def _turns(self) -> int:
        """Columns of the other weights between eight of a weight and the next."""
        return (self.count - 1) * EIGHT

    def _store_one(self, row: Any, column: Any, totals: Sequence[Any]) -> None:
        if self.split is not None:
            self.store_part(row, column, totals)
            return
        with when(column < self.arguments.operator.n):
            scale = bind(self.arguments.scale[row])
            self.arguments.finish(row, column, [total * scale for total in totals])


def _matrices(count: int, dtype: str) -> Any:
    """8 x 8 matrices, shared out over the lanes."""
    return B.alloc_buffer((count * _SIZE,), dtype, scope="metal.simdgroup")


def _load(out: Any, index: int, tile: Any, at: Any, *, is_transposed: bool = False) -> None:
    source = T.address_of(tile[at])
    load = simdgroup_load(out.data, index, source, EIGHT, transpose_matrix=is_transposed)
    B.evaluate(load)


def _warp_barrier() -> None:
    """The lanes of a warp see what each has written to threadgroup memory."""
    B.evaluate(T.tvm_storage_sync("warp"))
