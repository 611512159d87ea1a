"""From the portable parts of a weight to the packed buffer of the CPU kernels.

Runs once for each weight, when it is first loaded; rows of 16 in parallel.
"""

import functools
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import either
from .kernel import body, kernel
from .packing import DTYPE_BYTES, PackedWeight
from .vectors import LANES, ON_THE_STACK, ramp, splat


@functools.cache
def pack_func(weight: PackedWeight) -> tirx.PrimFunc:
    """(parts in the order of `TensorFormat.parts`) → packed [num_bytes] uint8."""
    name = f"pack_{weight.key}_{weight.format.layout.lower()}"
    with kernel(name) as (k, ib):
        parts = {
            part: k.buffer(part, shape, dtype)
            for part, (shape, dtype) in weight.format.parts(weight.n, weight.k).items()
        }
        packed = k.buffer("packed", (weight.num_bytes,), "uint8")
        with body(), B.parallel(T.int64(weight.num_blocks)) as block:
            if weight.planes:
                _pack_planes(weight, parts, packed, block)
                _pack_squares(weight, parts["q_scale"], packed, block)
            elif weight.is_quantized:
                _pack_groups(weight, parts, packed, block)
            elif weight.is_bfloat16:
                _pack_pairs(weight, parts["weight"], packed, block)
            else:
                _pack_floats(weight, parts["weight"], packed, block)
    return ib.get()


def _pack_floats(weight: PackedWeight, source: Any, packed: Any, block: Any) -> None:
    size = DTYPE_BYTES[weight.format.dtype]
    with B.serial(T.int64(weight.k)) as k, B.serial(T.int64(LANES)) as lane:
        row = B.Bind(block * LANES + lane)
        at = block * weight.block_bytes + (k * LANES + lane) * size
        with either(row < weight.n) as (inside, outside):
            with inside:
                _store(packed, at, size, source[row, k])
            with outside:
                _store(packed, at, size, None)


def _pack_pairs(weight: PackedWeight, source: Any, packed: Any, block: Any) -> None:
    def emit(pair: Any, num_values: int) -> None:
        with B.serial(T.int64(LANES)) as lane:
            row = B.Bind(block * LANES + lane)
            at = block * weight.block_bytes + (pair * LANES + lane) * 4
            with either(row < weight.n) as (inside, outside):
                with inside:
                    for i in range(2):
                        value = source[row, pair * 2 + i] if i < num_values else None
                        _store(packed, at + 2 * i, 2, value)
                with outside:
                    _store(packed, at, 4, None)

    with B.serial(T.int64(weight.k // 2)) as pair:
        emit(pair, 2)
    if weight.k % 2:
        emit(T.int64(weight.k // 2), 1)


def _pack_groups(weight: PackedWeight, parts: dict[str, Any], packed: Any, block: Any) -> None:
    fmt, size = weight.format, DTYPE_BYTES[weight.format.dtype]
    num_groups = fmt.padded_k(weight.k) // weight.group
    vectors = ["q_scale", "q_min"] if fmt.is_affine else ["q_scale"]
    with (
        B.serial(T.int64(weight.num_pairs)) as pair,
        B.serial(T.int64(2)) as half,
        B.serial(T.int64(LANES)) as lane,
    ):
        row, group = B.Bind(block * LANES + lane), B.Bind(pair * 2 + half)
        start = B.Bind(block * weight.block_bytes + pair * weight.pair_bytes)
        q_at = B.Bind(start + weight.q_offset + half * weight.q_bytes + lane * 4)
        vector_at = B.Bind(start + half * weight.vector_bytes + lane * size)

        def store(values: Sequence[Any], scales: Sequence[Any]) -> None:
            for j, word in enumerate(values):
                _store(packed, q_at + j * LANES * 4, 4, word)
            for i, scale in enumerate(scales):
                _store(packed, vector_at + i * 2 * weight.vector_bytes, size, scale)

        with either(T.And(row < weight.n, group < num_groups)) as (inside, outside):
            with inside:
                store(
                    [_word(weight, parts, row, group, j) for j in range(weight.words)],
                    [_scale(weight, parts[part], row, group) for part in vectors],
                )
            with outside:
                store([None] * weight.words, [None] * len(vectors))


def _pack_planes(weight: PackedWeight, parts: dict[str, Any], packed: Any, block: Any) -> None:
    fmt, upper = weight.format, weight.upper
    size = DTYPE_BYTES[fmt.dtype]
    with (
        B.serial(T.int64(weight.num_pairs)) as pair,
        B.serial(T.int64(2)) as half,
        B.serial(T.int64(LANES)) as lane,
    ):
        row, group = B.Bind(block * LANES + lane), B.Bind(pair * 2 + half)
        start = B.Bind(block * upper.block_bytes + pair * upper.pair_bytes)
        upper_at = B.Bind(start + upper.q_offset + half * upper.q_bytes + lane * 4)
        lower_at = weight.lower_offset + block * weight.lower_block_bytes
        lower_at = B.Bind(lower_at + (pair * 2 + half) * upper.q_bytes + lane * 4)
        scale_at = B.Bind(start + half * upper.vector_bytes + lane * size)

        def store(words: Sequence[Any], scale: Any) -> None:
            for j, (high, low) in enumerate(words):
                _store(packed, upper_at + j * LANES * 4, 4, high)
                _store(packed, lower_at + j * LANES * 4, 4, low)
            _store(packed, scale_at, size, scale)

        is_inside = T.And(row < weight.n, group < fmt.padded_k(weight.k) // weight.group)
        with either(is_inside) as (inside, outside):
            with inside:
                words = [
                    (
                        _nibbles(weight, parts, row, group, j, shift=4),
                        _nibbles(weight, parts, row, group, j, shift=0),
                    )
                    for j in range(upper.words)
                ]
                store(words, _scale(weight, parts["q_scale"], row, group))
            with outside:
                store([(None, None)] * upper.words, None)


def _pack_squares(weight: PackedWeight, scales: Any, packed: Any, block: Any) -> None:
    """The largest scale² of a block in each group; zeros for the blocks that a vector lacks."""
    fmt = weight.format
    largest = B.alloc_buffer((1,), "float32", annotations=ON_THE_STACK)
    with B.serial(T.int64(weight.num_groups)) as group:
        vector = block // LANES * weight.num_groups + group
        at = B.Bind(weight.squares_offset + (vector * LANES + block % LANES) * 4)
        B.buffer_store(largest, T.float32(0), [0])
        with B.serial(T.int64(LANES)) as lane:
            row = B.Bind(block * LANES + lane)
            with B.If(T.And(row < weight.n, group < fmt.padded_k(weight.k) // weight.group)):
                with B.Then():
                    scale = B.Bind(T.Cast("float32", _scale(weight, scales, row, group)))
                    B.buffer_store(largest, T.max(largest[0], scale * scale), [0])
        _store(packed, at, 4, largest[0])
        with B.If(block == weight.num_blocks - 1), B.Then():
            with B.serial(T.int64(-weight.num_blocks % LANES)) as missing:
                _store(packed, at + (missing + 1) * 4, 4, None)


def _scale(weight: PackedWeight, scales: Any, row: Any, group: Any) -> Any:
    """The scale of a group of the packed form."""
    return _element(weight, scales, row, group // (weight.format.group_size // weight.group))


def _nibbles(
    weight: PackedWeight, parts: dict[str, Any], row: Any, group: Any, j: int, shift: int
) -> Any:
    """Word j of a group of a plane: 4 bits of each q, from bit `shift` on."""
    result: Any = T.uint32(0)
    for byte in range(4):
        for high in range(2):
            value = _value(weight, parts, row, group, 4 * j + byte + high * weight.group // 2)
            value = (value >> T.uint32(shift)) & T.uint32(15)
            result = result | (value << T.uint32(8 * byte + 4 * high))
    return B.Bind(result)


def _word(weight: PackedWeight, parts: dict[str, Any], row: Any, group: Any, j: int) -> Any:
    """Packed word j of a group of one row."""
    if weight.is_nibbles:
        return _nibbles(weight, parts, row, group, j, shift=0)
    result: Any = T.uint32(0)
    for byte in range(4):
        value = _value(weight, parts, row, group, 4 * j + byte)
        result = result | (value << T.uint32(8 * byte))
    return B.Bind(result)


def _value(weight: PackedWeight, parts: dict[str, Any], row: Any, group: Any, k: int) -> Any:
    """Quantized value number k of a group, as uint32."""
    bits = weight.format.bits or 0
    low_bits = 4 if bits in (5, 6) else bits
    per_word = weight.format.values_per_word
    q = _field(weight, parts["q_weight"], row, group, k, low_bits, per_word)
    if "q_high" in parts:
        num_high = bits - 4
        high = _field(weight, parts["q_high"], row, group, k, num_high, 32 // num_high)
        q = q | (high << T.uint32(4))
    return q


def _field(
    weight: PackedWeight, words: Any, row: Any, group: Any, k: int, bits: int, per_word: int
) -> Any:
    index = group * (weight.group // per_word) + k // per_word
    shift = T.uint32(k % per_word * bits)
    word = _element(weight, words, row, index)
    return (word >> shift) & T.uint32((1 << bits) - 1)


def _element(weight: PackedWeight, part: Any, row: Any, column: Any) -> Any:
    return part[column, row] if weight.format.layout == "KN" else part[row, column]


def _store(packed: Any, at: Any, num_bytes: int, value: Any) -> None:
    """The bytes of a scalar; zeros for None."""
    if value is None:
        data = splat(T.uint8(0), num_bytes)
    else:
        data = T.reinterpret(f"uint8x{num_bytes}", value)
    B.buffer_store(packed, data, [ramp(at, num_bytes)])
