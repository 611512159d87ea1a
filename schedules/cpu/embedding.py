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
            block, lane = B.Bind(row // LANES * table.block_bytes), B.Bind(row % LANES)
            if table.is_quantized:
                _emit_groups(table, packed, block, lane, y, token, scale)
            else:
                _emit_values(table, packed, block, lane, y, token, scale)

        with body():
            for_rows(func.size("num_tokens"), table.k, emit)
    return ib.get()


def _emit_values(
    table: PackedWeight, packed: Any, block: Any, lane: Any, y: Any, token: Any, scale: float
) -> None:
    size = DTYPE_BYTES[table.format.dtype]
    with B.serial(T.int64(table.k)) as k:
        if table.is_bfloat16:
            at = (k // 2 * LANES + lane) * 2 + k % 2
        else:
            at = k * LANES + lane
        value = load_float(packed, block + at * size, table.format.dtype, 1)
        B.buffer_store(y, value * T.float32(scale), [token, k])


def _emit_groups(
    table: PackedWeight, packed: Any, block: Any, lane: Any, y: Any, token: Any, scale: float
) -> None:
    dtype, group = table.format.dtype, table.group
    lane_at = lane * DTYPE_BYTES[dtype]

    def emit(index: Any, count: int) -> None:
        half = index % 2
        start = B.Bind(block + index // 2 * table.pair_bytes)
        vectors = B.Bind(start + half * table.vector_bytes + lane_at)
        s = B.Bind(load_float(packed, vectors, dtype, 1) * T.float32(scale))
        if table.format.zero_point is None:
            low = load_float(packed, vectors + 2 * table.vector_bytes, dtype, 1)
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

        for j in range(table.words):
            at = start + table.q_offset + half * table.q_bytes + (j * LANES + lane) * 4
            word = B.Bind(packed[ramp(at, 4)])
            if table.is_nibbles:
                store(4 * j, T.bitwise_and(word, splat(T.uint8(15), 4)))
                store(4 * j + group // 2, T.shift_right(word, splat(T.uint8(4), 4)))
            else:
                store(4 * j, word)

    whole, rest = divmod(table.k, group)
    with B.serial(T.int64(whole)) as index:
        emit(index, group)
    if rest:
        emit(T.int64(whole), rest)
