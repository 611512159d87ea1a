"""Few rows times a weight: reads the weight once for some rows, as fast as memory gives it.

    block: threads as (lanes, columns of y); lanes go along K in steps of a word
    thread: registers [weights, columns, tokens], summed over the lanes in shared memory; what it
    reads of x serves all its columns

Side by side in memory are the words of a weight row (NK), or the rows of a word (KN): threadIdx.x
runs over those.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .kernel import bind, ceil_div, launch, load_vector, registers, store, when
from .limits import GpuLimits
from .linear_operator import LinearArguments, LinearOperator
from .reduce import over_lanes
from .weight import GpuWeight

_LEAST_LANES, _STEPS_A_LANE = 8, 8
"""With 8 words side by side, memory is still read in whole sectors of 32 bytes."""


def emit_gemv(arguments: LinearArguments, limits: GpuLimits, tokens: int) -> None:
    """Launch blocks over the columns of y and groups of `tokens` rows."""
    layer = arguments.operator
    weight = layer.weights[0]
    fast = limits.gemv_lanes if weight.is_transposed else _num_lanes(weight, limits)
    slow = limits.gemv_threads // fast
    lanes, teams = (slow, fast) if weight.is_transposed else (fast, slow)
    own = columns_of_a_thread(layer, limits, teams)
    blocks = [-(-layer.n // (teams * own)), ceil_div(arguments.rows, tokens)]
    with launch(blocks, [fast, slow]) as (block, threads):
        lane, team = reversed(threads) if weight.is_transposed else threads
        first = bind(block[0] * (teams * own) + team)
        columns = [bind(first + i * teams) if i else first for i in range(own)]
        # Lanes that are neighbours can do without shared memory.
        subgroup = (
            None if weight.is_transposed or lanes > (limits.subgroup or 0) else limits.subgroup
        )
        _Block(
            arguments, lanes, teams, tokens, subgroup, columns, bind(block[1] * tokens)
        ).emit(lane, team)  # fmt: skip


def columns_of_a_thread(layer: LinearOperator, limits: GpuLimits, teams: int) -> int:
    """As the limits say, but fewer where there would be too few blocks. Two weights share the
    registers of one."""
    own = max(limits.gemv_columns // len(layer.weights), 1)
    while own > 1 and -(-layer.n // (teams * own)) < limits.gemv_blocks:
        own = -(-own // 2)
    return own


def _num_lanes(weight: GpuWeight, limits: GpuLimits) -> int:
    """Fewer lanes for a short row: else most would have one word or none, and all the sum."""
    lanes = limits.gemv_lanes
    while lanes > _LEAST_LANES and weight.num_steps < _STEPS_A_LANE * lanes:
        lanes //= 2
    return lanes


@dataclass(slots=True)
class _Block:
    """Emits what a thread does."""

    arguments: LinearArguments
    lanes: int
    teams: int
    tokens: int
    subgroup: int | None
    columns: Sequence[Any]
    first_row: Any

    def emit(self, lane: Any, team: Any) -> None:
        weight = self.arguments.operator.weights[0]
        sums = registers(self._num_sums)
        for i in range(self._num_sums):
            store(sums, T.float32(0), i)
        # Beyond the last column and row, the last one; what comes of it is not stored.
        last = weight.n - 1
        columns = [bind(T.min(column, last)) for column in self.columns]
        last_row = self.arguments.rows - 1
        rows = [
            bind(T.min(self.first_row + t, last_row)) if t else self.first_row
            for t in range(self.tokens)
        ]
        with B.serial(-(-weight.num_steps // self.lanes)) as turn:
            step = bind(turn * self.lanes + lane)
            with when(step < weight.num_steps):
                self._add_step(step, columns, rows, sums)
        self._finish(lane, team, sums)

    @property
    def _num_sums(self) -> int:
        return len(self.arguments.readers) * len(self.columns) * self.tokens

    def _sum(self, w: int, c: int, t: int) -> int:
        return (w * len(self.columns) + c) * self.tokens + t

    def _add_step(self, step: Any, columns: Sequence[Any], rows: Sequence[Any], sums: Any) -> None:
        xs = [self._inputs(row, step) for row in rows]
        x_sums = [bind(functools.reduce(operator.add, x)) for x in xs]
        for w, reader in enumerate(self.arguments.readers):
            for c, column in enumerate(columns):
                loaded = reader.load(column, step)
                for t, value in enumerate(reader.dots(loaded, xs, x_sums)):
                    at = self._sum(w, c, t)
                    store(sums, sums[at] + value, at)

    def _inputs(self, row: Any, step: Any) -> Sequence[Any]:
        """What a step of weights is multiplied with; zeros beyond the last column of x."""
        weight, x = self.arguments.operator.weights[0], self.arguments.x
        first = bind(step * weight.step)
        if not weight.has_padding:
            return load_vector(x, (row,), first, weight.step)
        return [
            bind(T.if_then_else(first + i < weight.k, x[row, first + i], T.float32(0)))
            for i in range(weight.step)
        ]

    def _finish(self, lane: Any, team: Any, sums: Any) -> None:
        """Sum over the lanes; then lane 0 of each team stores."""
        totals = over_lanes(sums, self._num_sums, lane, self.lanes, team, self.teams, self.subgroup)
        arguments = self.arguments
        for c, column in enumerate(self.columns):
            for t in range(self.tokens):
                row = self.first_row + t
                is_inside = T.And(column < arguments.operator.n, row < arguments.rows)
                with when(T.And(lane == 0, is_inside)):
                    of_weights = [
                        bind(totals(self._sum(w, c, t))) for w in range(len(arguments.readers))
                    ]
                    arguments.finish(row, column, of_weights)
