"""Many rows times a weight by matrix instructions on halves, sums in float32: what a block of
threads does, whatever the instructions are.

    block: [rows, columns] of y, over K in tiles of `depth`, two stages in shared memory
    warp:  some rows and columns of it in registers

While a tile is multiplied, the next one's loads are under way; a weight is decoded after that, into
the other stage, so that there is one barrier a tile. Two weights (a gated MLP) lie side by side in
the tile by eights: a warp holds the same columns of both, and the activation is applied before
anything is stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .half_weight import CHUNK, HalfInstructions, HalfReader
from .kernel import barrier, bind, floor_div, floor_mod, shared, store, when
from .limits import MatrixTile
from .linear_operator import LinearArguments

EIGHT = 8
"""Columns of a weight that lie together where two weights take turns."""


@dataclass(slots=True)
class Pending:
    """A chunk on its way to shared memory: of the weight `reader`, to be decoded, or halves as they
    are, in four uint32."""

    tile: Any
    at: Any
    loaded: Sequence[Any]
    reader: HalfReader | None = None


@dataclass(slots=True)
class MatrixBlock(ABC):
    """Emits what a thread does. Subclasses say by which instructions."""

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

    # ---- the instructions

    @property
    @abstractmethod
    def instructions(self) -> HalfInstructions:
        """What decodes weights."""

    @abstractmethod
    def place(self, row: Any, chunk: Any) -> Any:
        """Where a chunk of a tile's row lies in shared memory; a multiple of 8."""

    @abstractmethod
    def copy(self, tile: Any, at: Any, source: Any, row: Any, column: Any) -> Pending | None:
        """Start to bring eight halves to a tile; what is to be stored there later, if anything."""

    @abstractmethod
    def store_halves(self, tile: Any, at: Any, words: Sequence[Any]) -> None:
        """Eight halves, in four uint32."""

    @abstractmethod
    def wait_for_copies(self) -> None:
        """Until what this thread has started to copy is there."""

    @abstractmethod
    def zeros(self) -> Any:
        """The warp's sums."""

    @abstractmethod
    def multiply(self, x_tile: Any, x_start: Any, w_tile: Any, w_start: Any, sums: Any) -> None:
        """Add a tile's products to the warp's sums."""

    @abstractmethod
    def store(self, sums: Any) -> None:
        """Scale and finish the sums, or leave them in the workspace."""

    # ---- what they have in common

    def emit(self) -> None:
        tile = self.tile
        readers = [HalfReader(reader, self.instructions) for reader in self.arguments.readers]
        x_size, w_size = tile.rows * tile.depth, tile.columns * tile.depth
        x_tile, w_tile = shared(2 * x_size, "float16"), shared(2 * w_size, "float16")
        sums = self.zeros()
        turns = -(-self.arguments.operator.k // tile.depth)
        start, end = T.int32(0), T.int32(turns)
        if self.split is not None:
            part, splits = self.split
            start = bind(floor_div(part * turns, splits))
            end = bind(floor_div((part + 1) * turns, splits))

        def load(turn: Any, stage: Any) -> list[Pending]:
            """Start a tile's loads."""
            first_chunk = bind(turn * self.chunks)
            pending = self._load_inputs(x_tile, bind(stage * x_size), first_chunk)
            w_start = bind(stage * w_size)
            for w, reader in enumerate(readers):
                pending += self._load_weight(reader, w, w_tile, w_start, first_chunk)
            return pending

        def finish(pending: list[Pending]) -> None:
            for one in pending:
                words = one.loaded if one.reader is None else one.reader.decode(one.loaded)
                self.store_halves(one.tile, one.at, words)
            self.wait_for_copies()
            barrier()

        finish(load(start, T.int32(0)))
        with B.serial(turns if self.split is None else bind(end - start)) as turn:
            stage = bind(floor_mod(turn, 2))
            # After the last tile that one again, into the stage that nobody reads.
            pending = load(bind(T.min(start + turn + 1, end - 1)), bind(1 - stage))
            self.multiply(x_tile, bind(stage * x_size), w_tile, bind(stage * w_size), sums)
            finish(pending)
        self.store(sums)

    def warp_start(self) -> tuple[Any, Any]:
        """The first row and column of the thread's warp in the tile."""
        across = self.tile.columns // self.tile.warp_columns
        warp = bind(floor_div(self.thread, 32))
        row, column = floor_div(warp, across), floor_mod(warp, across)
        return bind(row * self.tile.warp_rows), bind(column * self.tile.warp_columns)

    def store_part(self, row: Any, column: Any, totals: Sequence[Any]) -> None:
        """Into the workspace [split, weight, row, column]; `totals` are of each weight."""
        assert self.split is not None
        n, rows = self.arguments.operator.n, self.tile.rows
        with when(column < n):
            for w, total in enumerate(totals):
                at = ((self.split[0] * self.count + w) * rows + row) * n + column
                store(self.arguments.workspace, total, at)

    # ---- loads

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

    def _load_inputs(self, tile: Any, start: Any, first_chunk: Any) -> list[Pending]:
        """The tile's part of x; beyond the last row, the last one."""
        last_row = self.arguments.rows - 1
        pending = []
        for i, chunk in self._own_chunks(self.tile.rows):
            row = bind(T.min(self.first_row + i, last_row))
            at = bind(start + self.place(i, chunk))
            column = (first_chunk + chunk) * CHUNK
            pending.append(self.copy(tile, at, self.arguments.x_half, row, column))
        return [one for one in pending if one is not None]

    def _load_weight(
        self, reader: HalfReader, w: int, tile: Any, start: Any, first_chunk: Any
    ) -> list[Pending]:
        """The tile's part of weight number w. Beyond the last row and chunk it is the last one: y
        is not stored, or x is zero there."""
        weight = reader.reader.weight
        pending: list[Pending | None] = []
        own = self._own_chunks(self.tile.columns // self.count, is_transposed=weight.is_transposed)
        for i, chunk in own:
            row = bind(T.min(self.first_column + i, weight.n - 1))
            inside = bind(T.min(first_chunk + chunk, reader.num_chunks - 1))
            in_tile = i
            if self.count > 1:  # the weights take turns, eight rows each
                in_tile = bind(i + floor_div(i, EIGHT) * ((self.count - 1) * EIGHT) + w * EIGHT)
            at = bind(start + self.place(in_tile, chunk))
            if reader.is_copied:
                halves = reader.reader.parts["weight"]
                pending.append(self.copy(tile, at, halves, row, inside * CHUNK))
            else:
                pending.append(Pending(tile, at, reader.load(row, inside), reader))
        return [one for one in pending if one is not None]
