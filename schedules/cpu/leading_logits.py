"""Logits of which the highest alone is wanted, from a head in two planes (see `packing`).

Greedy decoding asks for the arg max of a row, and the upper 4 bits of an 8-bit head nearly decide
it. What the lower bits of row w of the head add to its logit is

    Σ over groups g of scale_g · Σ over k in g of (low_k - 7.5) · x_k,

a sum of many small terms; with lower bits that have nothing to do with x, its deviation is

    d = √((16² - 1) / 12 · Σ over g of scale_g² · |x_g|²)

It is taken to be less than 5 d, with the largest scales of a block of rows for all of them: that is
7 times their own for most rows, which one in 10^12 exceeds, and 5 times, one in 3 million, for a
row with the largest scales in all groups. So

1. `upper_logits` computes all logits from the upper bits alone, and half of the head is not read;
2. `least_highest` computes those of the most promising block exactly;
3. `refine` does so for every block that may still have a higher one.

The lower bits could have to do with x after all (in weights that were rounded to fewer bits before,
say). It would show in the blocks that are computed exactly: where one is further off than 4 d,
`refine_doubted` computes the whole row.

What is computed exactly has the same bits as in `linear.linears`; the rest of a row is lower than
its highest logit, and no better known.
"""

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from . import dot_int8, dot_many, linear
from .activation import GROUP
from .byte_dots import BYTE_DOTS
from .control import for_rows, parallel
from .isa import CpuIsa
from .kernel import Kernel, body, kernel, kernel_factory
from .linear_layer import unless_many
from .packing import PackedWeight
from .sampling_rows import highest_lane
from .tile_prefetch import Ahead, tile_ahead
from .vectors import (
    LANES,
    ON_THE_STACK,
    constant,
    fma,
    local_array,
    opaque,
    ramp,
    reduce_sum,
    splat,
)

_DEVIATIONS = 5.0
_DOUBTFUL = 0.8
"""Of a bound: a lower part that is larger is not what chance would make it."""
_ROUNDING = 1.125
"""What x rounded to int8 can add to the variance: its error is at most 1/254 of the largest |x| of
a group, of which |x_g|² is at least the square, times weights of up to 127 steps."""
_VARIANCE = _DEVIATIONS**2 * (16**2 - 1) / 12 * _ROUNDING


@kernel_factory
def group_norms(head: PackedWeight) -> tirx.PrimFunc:
    """x [m, K] → [m, groups] float32: (5 d)² of a weight with scales of 1, as above."""
    k, num_groups = head.k, head.num_groups
    with kernel(f"group_norms_{head.key}") as (func, ib):
        x = func.buffer("x", ("num_tokens", k), "float32")
        norms = func.buffer("norms", ("num_tokens", num_groups), "float32")

        def emit_group(row: Any, group: Any, count: int) -> None:
            squares = local_array(LANES)
            B.buffer_store(squares, constant(0.0), [ramp(0)])
            for start in range(0, count, LANES):
                first = group * GROUP + start
                if start + LANES <= count:
                    value = B.Bind(x[row, ramp(first)])
                    B.buffer_store(squares, squares[ramp(0)] + value * value, [ramp(0)])
                    continue
                with B.serial(T.int64(count - start)) as lane:
                    value = B.Bind(x[row, first + lane])
                    B.buffer_store(squares, squares[lane] + value * value, [lane])
            total = reduce_sum(squares[ramp(0)]) * T.float32(_VARIANCE)
            B.buffer_store(norms, total, [row, group])

        def emit(row: Any) -> None:
            whole, rest = divmod(k, GROUP)
            with B.serial(T.int64(whole)) as group:
                emit_group(row, group, GROUP)
            for number in range(whole, num_groups):
                emit_group(row, T.int64(number), rest if number == whole else 0)

        with body():
            for_rows(func.size("num_tokens"), k, emit)
    return ib.get()


class _Arguments:
    """The arguments that the kernels below share, and products with the head's blocks."""

    def __init__(self, func: Kernel, head: PackedWeight, isa: CpuIsa, terms: int) -> None:
        self.head, self.unit = head, BYTE_DOTS[isa.byte_dot or ""]
        self.x = linear.declare_x(func, [head], terms, isa)
        self.packed = func.buffer("packed", (head.num_bytes,), "uint8")
        self.num_ids = func.buffer("num_ids", (1,), "int32")
        self.source = linear.llvm_source(self.x, isa)

    def exact(self, block: Any, row: Any) -> Any:
        """The bound logits of a block and a row."""
        blocks = [(self.packed, block)]
        ((values,),) = dot_int8.dot_int8(self.head, blocks, self.x, row, 1, self.unit, Ahead(0))
        return B.Bind(values)

    def among_ids(self, block: Any, values: Any) -> Any:
        """The bound values, -inf for the rows of a block that are no ids."""
        ids = ramp(T.Cast("int32", block * LANES))
        is_id = ids < splat(self.num_ids[0])
        return B.Bind(T.Select(is_id, values, constant(-math.inf)))


def highest_shape(head: PackedWeight, m: Any) -> tuple[Any, int]:
    """Of the highest logit of each block, for m rows; blocks come in whole vectors of 16."""
    return (m, head.num_block_vectors * LANES)


@kernel_factory
def upper_logits(head: PackedWeight, isa: CpuIsa, terms: int) -> tirx.PrimFunc:
    """(x as in `linear.linears`, packed, num_ids [1] int32) → logits [m, N] float32 from the upper
    plane, and of each block the highest one of the first `num_ids` (`highest_shape`)."""
    schedule = linear.schedule_for([head.upper], isa, terms)
    with kernel(f"upper_logits_{head.key}_{isa.name}_{terms}") as (func, ib):
        arguments = _Arguments(func, head, isa, terms)
        packed, x = arguments.packed, arguments.x
        y = func.buffer("y", ("num_tokens", head.n), "float32")
        highest = func.buffer("highest", highest_shape(head, "num_tokens"), "float32")

        def emit(_: int, block: Any, count: Any, start: Any, stop: Any) -> None:
            def store(number: Any, first: Any, values: list[Any]) -> None:
                linear.store_rows(y, number, first, values, None)
                for i, value in enumerate(values):
                    value = highest_lane(arguments.among_ids(number, value))
                    B.buffer_store(highest, value, [first + i, number])

            def dot(blocks: list[Any], first: Any, tokens: int) -> None:
                is_pair = len(blocks) > 1
                ahead = tile_ahead(schedule, first, tokens, start, stop, is_pair=is_pair)
                pairs = [(packed, number) for number in blocks]
                results = dot_int8.dot_upper(head, pairs, x, first, tokens, arguments.unit, ahead)
                for number, values in zip(blocks, results, strict=True):
                    store(number, first, [B.Bind(value) for value in values])

            def emit_pair(first: Any, tokens: int) -> None:
                dot([block, opaque(block + count - 1)], first, tokens)

            def emit_tile(first: Any, tokens: int) -> None:
                if not schedule.least_paired:
                    dot([block], first, tokens)
                    return
                with B.serial(count) as j:
                    dot([opaque(block + j)], first, tokens)

            def emit_many(first: Any, tokens: Any) -> None:
                both = [block, opaque(block + count - 1)]

                def store_both(token: Any, values: list[Any]) -> None:
                    for number, value in zip(both, values, strict=True):
                        store(number, token, [value])

                blocks = [(packed, number) for number in both]
                distance = schedule.prefetch_many
                dot_many.dot_upper_many(
                    head, blocks, x, first, tokens, arguments.unit, distance, store_both
                )

            with unless_many(schedule.many_tokens, start, stop, emit_many):
                linear.for_pairs_and_tiles(start, stop, schedule, emit_pair, emit_tile)
            _fill_last_vector(head, highest, block + count, start, stop)

        with body(arguments.source):
            linear.for_blocks(
                func.size("num_tokens"), [head.upper], terms, schedule, emit, have_neighbours=True
            )
    return ib.get()


def _fill_last_vector(head: PackedWeight, highest: Any, end: Any, start: Any, stop: Any) -> None:
    """-inf where the last vector of blocks has none, with the last block (`end` - 1)."""
    missing = -head.num_blocks % LANES
    if not missing:
        return
    with B.If(end == head.num_blocks), B.Then():
        with B.serial(stop - start) as i, B.serial(T.int64(missing)) as lane:
            B.buffer_store(highest, T.float32(-math.inf), [start + i, head.num_blocks + lane])


@kernel_factory
def least_highest(head: PackedWeight, isa: CpuIsa, terms: int) -> tirx.PrimFunc:
    """(x, packed, num_ids, `highest` of `upper_logits`) → [m] float32, the highest exact logit of
    the block with the highest one: the row's highest is no lower; and [m] int32 zeros."""
    with kernel(f"least_highest_{head.key}_{isa.name}_{terms}") as (func, ib):
        arguments = _Arguments(func, head, isa, terms)
        highest = func.buffer("highest", highest_shape(head, "num_tokens"), "float32")
        least = func.buffer("least", ("num_tokens",), "float32")
        doubts = func.buffer("doubts", ("num_tokens",), "int32")
        with body(arguments.source), parallel(func.size("num_tokens")) as row:
            largest = local_array(LANES)
            B.buffer_store(largest, constant(-math.inf), [ramp(0)])
            with B.serial(T.int64(head.num_block_vectors)) as vector:
                values = T.max(largest[ramp(0)], highest[row, ramp(vector * LANES)])
                B.buffer_store(largest, values, [ramp(0)])
            value = highest_lane(B.Bind(largest[ramp(0)]))
            block = B.alloc_buffer((1,), "int64", annotations=ON_THE_STACK)
            B.buffer_store(block, T.int64(0), [0])
            is_before = T.And(block[0] < head.num_blocks - 1, highest[row, block[0]] < value)
            with B.While(is_before):
                B.buffer_store(block, block[0] + 1, [0])
            best = opaque(block[0])
            exact = highest_lane(arguments.among_ids(best, arguments.exact(best, row)))
            B.buffer_store(least, exact, [row])
            B.buffer_store(doubts, T.int32(0), [row])
    return ib.get()


@kernel_factory
def refine(head: PackedWeight, isa: CpuIsa, terms: int) -> tirx.PrimFunc:
    """(x, packed, num_ids, norms, highest, least, logits, doubts) → logits and doubts in place:
    exact logits in all blocks that may have one of at least `least`, and a doubt for rows in which
    these are not where they should be."""
    with kernel(f"refine_{head.key}_{isa.name}_{terms}") as (func, ib):
        arguments = _Arguments(func, head, isa, terms)
        norms = func.buffer("norms", ("num_tokens", head.num_groups), "float32")
        highest = func.buffer("highest", highest_shape(head, "num_tokens"), "float32")
        least = func.buffer("least", ("num_tokens",), "float32")
        y = func.buffer("y", ("num_tokens", head.n), "float32")
        doubts = func.buffer("doubts", ("num_tokens",), "int32")
        num_rows = func.size("num_tokens")

        def emit_block(row: Any, block: Any, margin: Any) -> None:
            exact = arguments.exact(block, row)
            if head.n % LANES == 0:
                before = y[row, ramp(block * LANES)]
            else:  # the last block has no whole vector there
                is_last = block == head.num_blocks - 1
                at = T.if_then_else(is_last, T.int64(0), block * LANES)
                before = T.if_then_else(is_last, exact, y[row, ramp(at)])
            change = exact - B.Bind(before)
            change = T.max(change, constant(0.0) - change)
            largest = highest_lane(arguments.among_ids(block, change))
            with B.If(largest > margin * T.float32(_DOUBTFUL)), B.Then():
                B.buffer_store(doubts, T.int32(1), [row])
            linear.store_rows(y, block, row, [exact], None)

        def emit(vector: Any, row: Any) -> None:
            margin = B.Bind(T.sqrt(_variances(head, arguments.packed, norms, vector, row)))
            bound = highest[row, ramp(vector * LANES)] + margin
            is_open = T.Select(bound >= splat(least[row]), splat(T.int32(1)), splat(T.int32(0)))
            flags = B.alloc_buffer((LANES,), "int32", annotations=ON_THE_STACK)
            margins = local_array(LANES)
            B.buffer_store(flags, is_open, [ramp(0)])
            B.buffer_store(margins, margin, [ramp(0)])
            any_open = T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.or", flags[ramp(0)])
            with B.If(any_open != 0), B.Then(), B.serial(T.int64(LANES)) as lane:
                with B.If(flags[lane] != 0), B.Then():
                    emit_block(row, opaque(vector * LANES + lane), margins[lane])

        with body(arguments.source), parallel(T.int64(head.num_block_vectors)) as vector:
            with B.serial(num_rows) as row:
                emit(opaque(vector), row)
    return ib.get()


def _variances(head: PackedWeight, packed: Any, norms: Any, vector: Any, row: Any) -> Any:
    """(5 d)² of the 16 blocks of a vector, for a row."""
    sums = local_array(LANES)
    B.buffer_store(sums, constant(0.0), [ramp(0)])
    start = B.Bind(head.squares_offset + vector * (head.num_groups * LANES * 4))
    with B.serial(T.int64(head.num_groups)) as group:
        squares = packed[ramp(start + group * (LANES * 4), LANES * 4)]
        squares = T.reinterpret("float32x16", squares)
        value = fma(squares, splat(norms[row, group]), sums[ramp(0)], LANES)
        B.buffer_store(sums, value, [ramp(0)])
    return sums[ramp(0)]


@kernel_factory
def refine_doubted(head: PackedWeight, isa: CpuIsa, terms: int) -> tirx.PrimFunc:
    """(x, packed, num_ids, doubts, logits) → logits in place: exact ones in rows in doubt."""
    with kernel(f"refine_doubted_{head.key}_{isa.name}_{terms}") as (func, ib):
        arguments = _Arguments(func, head, isa, terms)
        doubts = func.buffer("doubts", ("num_tokens",), "int32")
        y = func.buffer("y", ("num_tokens", head.n), "float32")
        num_rows = func.size("num_tokens")
        with body(arguments.source), parallel(T.int64(head.num_blocks)) as number:
            block = opaque(number)
            with B.serial(num_rows) as row, B.If(doubts[row] != 0), B.Then():
                linear.store_rows(y, block, row, [arguments.exact(block, row)], None)
    return ib.get()
