"""Rows of a packed table."""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import for_rows
from .kernel import body, kernel, kernel_factory
from .packing import DTYPE_BYTES, PackedWeight
from .vectors import LANES, local_array, ramp, splat
from .weight_vectors import load_float


@kernel_factory
def embedding(table: PackedWeight, scale: float = 1.0) -> tirx.PrimFunc:
    """(ids [m] int32, packed) → rows of the table times `scale`, [m, K] float32."""
    name = f"embedding_{table.key}_{scale!r}".replace(".", "_").replace("-", "_")
    with kernel(name) as (func, ib):
        ids = func.buffer("ids", ("num_tokens",), "int32")
        packed = func.buffer("packed", (table.num_bytes,), "uint8")
        y = func.buffer("y", ("num_tokens", table.k), "float32")

        def emit(token: Any) -> None:
            row = B.Bind(T.Cast("int64", ids[token]))
            block, lane = B.Bind(row // LANES), B.Bind(row % LANES)
            if table.is_quantized:
                _emit_groups(table, packed, block, lane, y, token, scale)
            else:
                start = B.Bind(block * table.block_bytes)
                _emit_values(table, packed, start, lane, y, token, scale)

        with body():
            for_rows(func.size("num_tokens"), table.k, emit)
    return ib.get()


def _emit_values(
    table: PackedWeight, packed: Any, start: Any, lane: Any, y: Any, token: Any, scale: float
) -> None:
    size = DTYPE_BYTES[table.format.dtype]
    with B.serial(T.int64(table.k)) as k:
        if table.is_bfloat16:
            at = (k // 2 * LANES + lane) * 2 + k % 2
        else:
            at = k * LANES + lane
        value = load_float(packed, start + at * size, table.format.dtype, 1)
        B.buffer_store(y, value * T.float32(scale), [token, k])


def _emit_groups(
    table: PackedWeight, packed: Any, block: Any, lane: Any, y: Any, token: Any, scale: float
) -> None:
    dtype, group = table.format.dtype, table.group
    lane_at = lane * DTYPE_BYTES[dtype]
    stored = table.upper if table.planes else table
    """What the block is made of; of two planes, but for the lower bits."""

    def emit(index: Any, count: int) -> None:
        pair, half = index // 2, index % 2
        start = B.Bind(block * stored.block_bytes + pair * stored.pair_bytes)
        vectors = B.Bind(start + half * stored.vector_bytes + lane_at)
        s = B.Bind(load_float(packed, vectors, dtype, 1) * T.float32(scale))
        if table.format.zero_point is None:
            low = load_float(packed, vectors + 2 * stored.vector_bytes, dtype, 1)
            low = B.Bind(low * T.float32(scale))
        else:
            low = B.Bind(s * T.float32(-table.format.zero_point))

        def store(k: int, q: Any) -> None:
            """Four values from k on, as far as the table goes."""
            values = T.Cast("float32x4", q) * splat(s, 4) + splat(low, 4)
            if k + 4 <= count:
                B.buffer_store(y, values, [token, ramp(index * group + k, 4)])
            elif k < count:
                scratch = local_array(4)
                B.buffer_store(scratch, values, [ramp(0, 4)])
                for i in range(count - k):
                    B.buffer_store(y, scratch[i], [token, index * group + k + i])

        four, mask = splat(T.uint8(4), 4), splat(T.uint8(15), 4)
        for j in range(stored.words):
            in_group = (j * LANES + lane) * 4
            at = start + stored.q_offset + half * stored.q_bytes + in_group
            word = B.Bind(packed[ramp(at, 4)])
            if table.planes:
                pair_at = block * table.lower_block_bytes + pair * table.lower_pair_bytes
                at = table.lower_offset + pair_at + half * stored.q_bytes + in_group
                lower = B.Bind(packed[ramp(at, 4)])
                first = T.bitwise_or(T.shift_left(word, four), T.bitwise_and(lower, mask))
                upper = T.bitwise_and(word, splat(T.uint8(0xF0), 4))
                store(4 * j, first)
                store(4 * j + group // 2, T.bitwise_or(upper, T.shift_right(lower, four)))
            elif table.is_nibbles:
                store(4 * j, T.bitwise_and(word, mask))
                store(4 * j + group // 2, T.shift_right(word, four))
            else:
                store(4 * j, word)

    whole, rest = divmod(table.k, group)
    with B.serial(T.int64(whole)) as index:
        emit(index, group)
    if rest:
        emit(T.int64(whole), rest)
