"""Linear layers for CPUs that act as GPUs: every thread keeps its part of y in registers.

    block: threads, side by side along the columns of y
    thread: [rows, columns] of y; what it decodes of a weight serves all its rows, what it reads of
    x all its columns

There is no shared memory and no barrier: such devices run a block's threads one after another, and
have to leave and enter each of them at every barrier.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .kernel import bind, ceil_div, launch, load_vector, registers, store, when
from .limits import GpuLimits
from .linear_operator import LinearArguments
from .weight import GpuWeight, WeightReader


def emit_register_linear(arguments: LinearArguments, limits: GpuLimits, num_rows: int) -> None:
    """Launch blocks over the columns of y and groups of `num_rows` rows."""
    operator, weight = arguments.operator, arguments.operator.weights[0]
    # Two weights share the registers of one.
    count, threads = len(operator.weights), limits.register_threads
    own = limits.register_columns if num_rows > 1 else limits.register_columns // 2
    num_columns = max(own // count, 1)
    blocks = [-(-operator.n // (threads * num_columns)), ceil_div(arguments.rows, num_rows)]
    with launch(blocks, [threads]) as (block, (thread,)):
        first_row = bind(block[1] * num_rows)
        first_column = bind((block[0] * threads + thread) * num_columns)
        # Beyond the last column and row, the last one; what comes of it is not stored.
        rows = [bind(T.min(first_row + m, arguments.rows - 1)) for m in range(num_rows)]
        columns = [bind(T.min(first_column + j, weight.n - 1)) for j in range(num_columns)]
        sums = registers(count * num_columns * num_rows)
        for i in range(count * num_columns * num_rows):
            store(sums, T.float32(0), i)
        pairs = list(product(arguments.readers, columns))
        if num_rows == 1:
            steps = _steps_together(weight)
            with B.serial(weight.num_steps // steps) as turn:
                _add_row(arguments, pairs, rows[0], bind(turn * steps), steps, sums)
        else:
            with B.serial(weight.num_steps) as step:
                _add_rows(arguments, pairs, rows, step, sums)
        for m in range(num_rows):
            for j in range(num_columns):
                row, column = first_row + m, first_column + j
                with when(T.And(row < arguments.rows, column < weight.n)):
                    totals = [sums[(w * num_columns + j) * num_rows + m] for w in range(count)]
                    arguments.finish(row, column, totals)


Pairs = Sequence[tuple[WeightReader, Any]]
"""(weight, column of y): what a thread computes of a row."""


def _steps_together(weight: GpuWeight) -> int:
    """Steps of one group, and of one word of high bits where there are some."""
    fmt = weight.format
    if fmt.bits is None:
        return 1
    values = min(fmt.group_size, {5: 32, 6: 16}.get(fmt.bits, fmt.group_size))
    return values // weight.step


def _add_row(
    arguments: LinearArguments, pairs: Pairs, row: Any, first: Any, steps: int, sums: Any
) -> None:
    """The products of one row of x with `steps` steps from `first` on, of one group."""
    x = [value for s in range(steps) for value in _inputs(arguments, row, bind(first + s))]
    x_sum = x[0]
    for value in x[1:]:
        x_sum = x_sum + value
    x_sum = bind(x_sum)
    for i, (reader, column) in enumerate(pairs):
        if reader.weight.format.bits is None:
            loaded = reader.load(column, first)
        else:
            loaded = [bind(reader.part("q_weight", column, first + s)) for s in range(steps)]
            if reader.weight.format.bits in (5, 6):
                loaded.append(reader.high_bits(column, first))
            loaded += reader.scales(column, first)
        (dot,) = reader.dots(loaded, [x], [x_sum])
        store(sums, sums[i] + dot, i)


def _add_rows(
    arguments: LinearArguments, pairs: Pairs, rows: Sequence[Any], step: Any, sums: Any
) -> None:
    """Decodes into registers, or TVM writes the decoding again for every row."""
    size = arguments.operator.weights[0].step
    decoded = registers(len(pairs) * size)
    for i, (reader, column) in enumerate(pairs):
        for e, value in enumerate(reader.values(column, step)):
            store(decoded, value, i * size + e)
    for m, row in enumerate(rows):
        x = _inputs(arguments, row, step)
        for i in range(len(pairs)):
            total = sums[i * len(rows) + m]
            for e in range(size):
                total = total + x[e] * decoded[i * size + e]
            store(sums, total, i * len(rows) + m)


def _inputs(arguments: LinearArguments, row: Any, step: Any) -> Sequence[Any]:
    """What a step of weights is multiplied with; zeros beyond the last column of x."""
    weight, x = arguments.operator.weights[0], arguments.x
    first = bind(step * weight.step)
    if not weight.has_padding:
        return load_vector(x, (row,), first, weight.step)
    return [
        bind(T.if_then_else(first + i < weight.k, x[row, first + i], T.float32(0)))
        for i in range(weight.step)
    ]
