"""Few rows times a weight, with wide reads: what `gemv` does, for GPUs whose memory is far away.

    block: threads as (lanes, columns of y); a lane reads some words of a row at once, 16 bytes:
           of quantized values, or of 16-bit floats
    thread: registers [weights, columns, tokens], summed over the lanes in the end

Memory that takes hundreds of cycles to answer is kept busy by what is under way at the same time:

    bytes under way = blocks · threads · columns · 16 · stages

With `gemv_stages`, reads go to shared memory some turns ahead, each lane to places of its own; so
they are under way whatever order a compiler puts instructions in, and without registers. Scales and
the like are read one turn ahead into registers.

x lies in shared memory, a part at a time. Lanes read it in vectors of 4 from places one span apart;
after each span comes a gap of 4, which puts the places of neighbours into different banks.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .cuda_instructions import commit_copies, copy_async, wait_for_copies
from .gemv import columns_of_a_thread
from .kernel import (
    barrier,
    bind,
    ceil_div,
    floor_div,
    floor_mod,
    launch,
    load_vector,
    registers,
    share,
    shared,
    store,
    store_vector,
    when,
)
from .limits import GpuLimits
from .linear_operator import LinearArguments
from .reduce import over_lanes
from .weight import HALVES, GpuWeight, WeightReader, floats_of_bfloat16, load_floats

_LEAST_LANES = 8
_GAP = 4
_PART = 4096
"""Floats of x, of all tokens together, in shared memory at a time, without gaps."""


def has_wide_reads(weight: GpuWeight, limits: GpuLimits) -> bool:
    """Whether words of a row are neighbours, and can be read several at once."""
    return _num_words(weight, limits) > 1


def _num_words(weight: GpuWeight, limits: GpuLimits) -> int:
    """Words of a span: of one group, at most as many as the limits say."""
    fmt = weight.format
    if fmt.bits is None:
        is_half = fmt.dtype in HALVES and not weight.halves_in_words
        return math.gcd(limits.gemv_words, weight.k // 2) if is_half and weight.k % 2 == 0 else 1
    if weight.is_transposed:
        return 1
    return math.gcd(limits.gemv_words, fmt.group_size // weight.step)


def _span(weight: GpuWeight, words: int) -> int:
    """Values in so many words."""
    return words * (2 if weight.format.bits is None else weight.step)


def emit_wide_gemv(arguments: LinearArguments, limits: GpuLimits, tokens: int) -> None:
    """Launch blocks over the columns of y and groups of `tokens` rows."""
    layer = arguments.operator
    words = _num_words(layer.weights[0], limits)
    weight = layer.weights[0]
    lanes = _num_lanes(weight.num_steps * weight.step // _span(weight, words), limits)
    teams = limits.gemv_threads // lanes
    own = columns_of_a_thread(layer, limits, teams)
    blocks = [-(-layer.n // (teams * own)), ceil_div(arguments.rows, tokens)]
    with launch(blocks, [lanes, teams]) as (block, (lane, team)):
        first = bind(block[0] * (teams * own) + team)
        columns = [bind(first + i * teams) if i else first for i in range(own)]
        _Block(
            arguments, limits, lanes, teams, tokens, words, columns, bind(block[1] * tokens),
            lane, team,
        ).emit()  # fmt: skip


def _num_lanes(num_spans: int, limits: GpuLimits) -> int:
    """As the limits say, but fewer where more of them would have something to read."""
    most = limits.gemv_lanes
    choices = [most // n for n in (1, 2, 4) if most // n >= _LEAST_LANES] or [most]
    return min(choices, key=lambda lanes: -(-num_spans // lanes) * lanes)


@dataclass(slots=True)
class _Block:
    """Emits what a thread does."""

    arguments: LinearArguments
    limits: GpuLimits
    lanes: int
    teams: int
    tokens: int
    words: int
    columns: Sequence[Any]
    first_row: Any
    lane: Any
    team: Any

    @property
    def weight(self) -> GpuWeight:
        return self.arguments.operator.weights[0]

    @property
    def span(self) -> int:
        """Values that a lane reads at once."""
        return _span(self.weight, self.words)

    @property
    def num_spans(self) -> int:
        return self.weight.num_steps * self.weight.step // self.span

    @property
    def turns(self) -> int:
        return -(-self.num_spans // self.lanes)

    @property
    def turns_a_part(self) -> int:
        """Turns whose x is in shared memory together; equal shares."""
        most = max(_PART // self.tokens // (self.lanes * self.span), 1)
        return -(-self.turns // -(-self.turns // most))

    @property
    def num_sums(self) -> int:
        return len(self.arguments.readers) * len(self.columns) * self.tokens

    def _sum(self, w: int, c: int, t: int) -> int:
        return (w * len(self.columns) + c) * self.tokens + t

    def emit(self) -> None:
        sums = registers(self.num_sums)
        for i in range(self.num_sums):
            store(sums, T.float32(0), i)
        # Beyond the last column, the last one; what comes of it is not stored.
        inside = [bind(T.min(column, self.weight.n - 1)) for column in self.columns]
        sources = [(reader, column) for reader in self.arguments.readers for column in inside]
        reads = _Reads(self, sources)
        x_part = shared(self.tokens * self._row_size)
        reads.start()
        parts = -(-self.turns // self.turns_a_part)
        with B.serial(parts) as part:
            first_turn = bind(part * self.turns_a_part)
            if parts > 1:
                barrier()  # nobody reads the part before any more
            self._load_inputs(x_part, first_turn)
            barrier()
            num_turns = bind(T.min(self.turns_a_part, self.turns - first_turn))
            with B.serial(num_turns) as turn:
                x_start = bind((turn * self.lanes + self.lane) * (self.span + _GAP))
                loaded = reads.take(bind(first_turn + turn))
                self._add(loaded, x_part, x_start, sums)
        self._finish(sums)

    # ---- x

    @property
    def _row_size(self) -> int:
        """Floats of a token in shared memory."""
        return self.turns_a_part * self.lanes * (self.span + _GAP)

    def _load_inputs(self, x_part: Any, first_turn: Any) -> None:
        """A part of x; zeros beyond the last column, and beyond the last row that one."""
        k, x = self.weight.k, self.arguments.x
        threads = self.lanes * self.teams
        thread = bind(self.team * self.lanes + self.lane)
        vectors = self.turns_a_part * self.lanes * self.span // 4
        first = bind(first_turn * (self.lanes * self.span))
        for t in range(self.tokens):
            row = bind(T.min(self.first_row + t, self.arguments.rows - 1))
            with share(T.int32(vectors), thread, threads) as vector:
                column = bind(first + vector * 4)
                gaps = floor_div(vector, self.span // 4) * _GAP
                at = bind(vector * 4 + gaps + t * self._row_size)
                if k % 4 == 0:
                    is_inside = bind(column < k)
                    loaded = load_vector(x, (row,), bind(T.Select(is_inside, column, 0)), 4)
                    values = [bind(T.Select(is_inside, v, T.float32(0))) for v in loaded]
                else:
                    values = [
                        bind(T.if_then_else(column + i < k, x[row, column + i], T.float32(0)))
                        for i in range(4)
                    ]
                store_vector(x_part, values, at)

    # ---- products

    def _add(self, loaded: Sequence[Sequence[Any]], x_part: Any, x_start: Any, sums: Any) -> None:
        """`loaded`: of each weight and column."""
        rows = self.arguments.rows
        readers = [reader.with_hidden_one(rows) for reader in self.arguments.readers]
        xs = [
            load_vector(x_part, (), x_start + t * self._row_size, self.span)
            for t in range(self.tokens)
        ]
        x_sums = [bind(functools.reduce(operator.add, x)) for x in xs]
        for i, one in enumerate(loaded):
            w, c = divmod(i, len(self.columns))
            for t, value in enumerate(readers[w].dots(one, xs, x_sums)):
                at = self._sum(w, c, t)
                store(sums, sums[at] + value, at)

    def _finish(self, sums: Any) -> None:
        """Sum over the lanes; then lane 0 of each team stores."""
        arguments = self.arguments
        subgroup = self.limits.subgroup
        if subgroup is not None and subgroup < self.lanes:
            subgroup = None
        totals = over_lanes(
            sums, self.num_sums, self.lane, self.lanes, self.team, self.teams, subgroup
        )
        for c, column in enumerate(self.columns):
            for t in range(self.tokens):
                row = self.first_row + t
                is_inside = T.And(column < arguments.operator.n, row < arguments.rows)
                with when(T.And(self.lane == 0, is_inside)):
                    of_weights = [
                        bind(totals(self._sum(w, c, t))) for w in range(len(arguments.readers))
                    ]
                    arguments.finish(row, column, of_weights)


class _Reads:
    """What a thread reads of the weights: by the turn, of every (reader, column) in `sources`."""

    def __init__(self, block: _Block, sources: Sequence[tuple[WeightReader, Any]]) -> None:
        self.block, self.sources = block, sources
        self.stages = block.limits.gemv_stages
        thread = bind(block.team * block.lanes + block.lane)
        threads, count = block.lanes * block.teams, len(sources)
        fmt = block.weight.format
        self.part = "weight" if fmt.bits is None else "q_weight"
        # Of what a span is made, in its tensor; and in shared memory, where the bits are the same.
        self.size = block.span if fmt.bits is None else block.words
        is_float16 = fmt.bits is None and fmt.dtype == "float16"
        staged, size = ("float16", block.span) if is_float16 else ("uint32", block.words)
        self.places = [bind((thread + i * threads) * size) for i in range(count)]
        self.stage_size = count * threads * size
        self.staged = shared(self.stages * self.stage_size, staged) if self.stages else None
        self.num_scales = 0 if fmt.bits is None else 2 if fmt.is_affine else 1
        self.scales = registers(max(count * self.num_scales, 1))
        self.high_bits = registers(count, "uint32") if fmt.bits in (5, 6) else None

    def start(self) -> None:
        """The first reads; all threads of the block come here, and to each `take`."""
        for turn in range(self.stages - 1):
            if turn < self.block.turns:
                self._copy(T.int32(turn), T.int32(turn))
            commit_copies()
        self._load_scales(T.int32(0))

    def take(self, turn: Any) -> list[Sequence[Any]]:
        """Of each source what `WeightReader.dots` takes; then the reads of a later turn."""
        block = self.block
        taken: list[Sequence[Any]] = []
        if self.staged is not None:
            wait_for_copies(self.stages - 2)
            start = bind(floor_mod(turn, self.stages) * self.stage_size)
            words = [self._staged(bind(start + place)) for place in self.places]
            ahead = bind(turn + (self.stages - 1))
            with when(ahead < block.turns):
                self._copy(ahead, bind(floor_mod(ahead, self.stages)))
            commit_copies()
        else:
            first = self._first(turn)
            words = [self._read(reader, column, first) for reader, column in self.sources]
        for i, of_source in enumerate(words):
            high = [] if self.high_bits is None else [bind(self.high_bits[i])]
            first = i * self.num_scales
            scales = [bind(self.scales[first + j]) for j in range(self.num_scales)]
            taken.append([*of_source, *high, *scales])
        self._load_scales(bind(T.min(turn + 1, block.turns - 1)))
        return taken

    def _first(self, turn: Any) -> Any:
        """Where the lane's span begins in a row; beyond the last span, where that one does: x is
        zero there."""
        block = self.block
        span = T.min(turn * block.lanes + block.lane, block.num_spans - 1)
        return bind(span * self.size)

    def _copy(self, turn: Any, stage: Any) -> None:
        first, start = self._first(turn), bind(stage * self.stage_size)
        for place, (reader, column) in zip(self.places, self.sources, strict=True):
            source, num_bytes = reader.parts[self.part], 4 * self.block.words
            copy_async(self.staged, start + place, source, column, first, num_bytes=num_bytes)

    def _staged(self, at: Any) -> list[Any]:
        """A span in shared memory: its words, or float32 values."""
        fmt = self.block.weight.format
        if fmt.bits is None and fmt.dtype == "float16":
            return load_floats(self.staged, (), at, self.block.span)
        words = load_vector(self.staged, (), at, self.block.words)
        return words if fmt.bits is not None else floats_of_bfloat16(words)

    def _read(self, reader: WeightReader, column: Any, first: Any) -> list[Any]:
        """The same from its tensor."""
        source = reader.parts[self.part]
        if self.block.weight.format.bits is None:
            return load_floats(source, (column,), first, self.block.span)
        return load_vector(source, (column,), first, self.block.words)

    def _load_scales(self, turn: Any) -> None:
        if not self.num_scales:
            return
        step = self._first(turn)
        for i, (reader, column) in enumerate(self.sources):
            if self.high_bits is not None:
                store(self.high_bits, reader.high_bits(column, step), i)
            for j, number in enumerate(reader.scales(column, step)):
                store(self.scales, number, i * self.num_scales + j)
