"""GGUF's quantized blocks as our packed parts, without loss.

Source of the layouts: ggml's `block_*` structs (ggml-common.h). Every block type here dequantizes
to the very numbers that PyPI `gguf` gives, in the same float32 operations: products of a float16
scale, a 6- or 8-bit sub-scale and a value have at most 24 significant bits, so they are exact, and
an affine weight is rounded once, where the minimum is added. (Where a scale's sign is turned, a
weight of zero may change its sign.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..artifact.dtypes import numpy_dtype
from ..artifact.errors import CheckpointError
from ..artifact.tensor_format import TensorFormat
from .bits import pack_values

Bytes = np.ndarray  # uint8, which NumPy's stubs lose at the first shift
Floats = npt.NDArray[np.float32]

_CHUNK_BLOCK_BYTES = 1 << 22
"""Raw bytes decoded at a time, so that memory stays near the result's."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    """q: [num_blocks, block_size] uint8; scale, minimum: [num_blocks, groups per block] float32,
    exact in the format's dtype."""

    q: Bytes
    scale: Floats
    minimum: Floats | None = None


@dataclass(frozen=True, slots=True)
class _BlockType:
    block_size: int
    num_bytes: int
    fmt: TensorFormat
    decode: Callable[[Bytes], _Decoded]


def format_for(ggml_type: str) -> TensorFormat:
    """The format that `import_blocks` gives for a block type such as `Q4_K`; CheckpointError if
    the type is not supported."""
    return _block_type(ggml_type).fmt


def import_blocks(
    raw: Bytes, ggml_type: str, *, name: str
) -> tuple[TensorFormat, dict[str, np.ndarray]]:
    """A GGUF tensor's blocks, [rows, bytes per row] uint8, as `format_for(ggml_type)` and parts.

    CheckpointError, naming the tensor, if the type is not supported, a row is not whole blocks,
    or a scale is NaN or infinite.
    """
    kind = _block_type(ggml_type)
    num_rows, row_bytes = raw.shape
    if row_bytes == 0 or row_bytes % kind.num_bytes:
        raise CheckpointError(
            f"tensor {name} has rows of {row_bytes} bytes, not a multiple of the "
            f"{kind.num_bytes} bytes of a {ggml_type} block; the file is damaged"
        )
    fmt, k = kind.fmt, row_bytes // kind.num_bytes * kind.block_size
    expected = fmt.parts(num_rows, k).items()
    out = {part: np.empty(shape, numpy_dtype(dtype)) for part, (shape, dtype) in expected}
    chunk_rows = max(1, _CHUNK_BLOCK_BYTES // row_bytes)
    for start in range(0, num_rows, chunk_rows):
        rows = slice(start, min(start + chunk_rows, num_rows))
        blocks = np.ascontiguousarray(raw[rows]).reshape(-1, kind.num_bytes)
        with np.errstate(invalid="ignore"):  # infinity times 0; caught below
            decoded = kind.decode(blocks)
        parts = pack_values(decoded.q.reshape(-1, k), fmt)
        for part, numbers in (("q_scale", decoded.scale), ("q_min", decoded.minimum)):
            if numbers is None:
                continue
            if not np.isfinite(numbers).all():
                raise CheckpointError(
                    f"tensor {name} holds a {ggml_type} block whose scale is NaN or infinite; "
                    f"the file is damaged, fetch it again"
                )
            parts[part] = numbers.reshape(-1, out[part].shape[1])
        for part, array in parts.items():
            out[part][rows] = array
    return fmt, out


def _block_type(ggml_type: str) -> _BlockType:
    try:
        return _BLOCK_TYPES[ggml_type]
    except KeyError:
        raise CheckpointError(
            f"GGUF block type {ggml_type} is not supported; "
            f"supported: F32, F16, BF16, {', '.join(_BLOCK_TYPES)}"
        ) from None


def _decode_q4_0(blocks: Bytes) -> _Decoded:
    """| d float16 | 16 bytes: value j low, value j+16 high |,  w = (q - 8) * d.

    As (q' - 7) * s with q' = 15 - q and s = -d it is MLC's q4f16_1.
    """
    return _Decoded(15 - _halves(blocks[:, 2:]), -_float16(blocks, 0))


def _decode_q4_1(blocks: Bytes) -> _Decoded:
    """| d float16 | m float16 | 16 bytes as Q4_0 |,  w = q * d + m."""
    return _Decoded(_halves(blocks[:, 4:]), _float16(blocks, 0), _float16(blocks, 2))


def _decode_q5_0(blocks: Bytes) -> _Decoded:
    """| d float16 | 32 fifth bits | 16 bytes as Q4_0 |,  w = (q - 16) * d."""
    return _Decoded(_halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _float16(blocks, 0))


def _decode_q5_1(blocks: Bytes) -> _Decoded:
    """| d float16 | m float16 | 32 fifth bits | 16 bytes as Q4_0 |,  w = q * d + m."""
    q = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Decoded(q, _float16(blocks, 0), _float16(blocks, 2))


def _decode_q8_0(blocks: Bytes) -> _Decoded:
    """| d float16 | 32 int8 |,  w = q * d: MLC's q8f16_1 with q' = q + 127.

    A block with q = -128 has no such q'; there q' = 127 - q and the scale is -d.
    """
    q = blocks[:, 2:].view(np.int8)
    scale = _float16(blocks, 0)
    turned = (q == -128).any(axis=1, keepdims=True)
    # uint8 arithmetic wraps around, which is right for the chosen branch.
    values = q.view(np.uint8)
    return _Decoded(np.where(turned, 127 - values, values + 127), np.where(turned, -scale, scale))


def _decode_q4_k(blocks: Bytes) -> _Decoded:
    """| d float16 | dmin float16 | 12 bytes of 6-bit scales and minima | 128 bytes |, 256 values.

    Sub-block i of 32 values: w = q * (d * sc[i]) - dmin * m[i]. 32 bytes hold sub-block 2j in
    their low nibbles and 2j + 1 in their high ones.
    """
    scale, minimum = _k_scales(blocks)
    return _Decoded(_k_nibbles(blocks[:, 16:], 32), scale, minimum)


def _decode_q5_k(blocks: Bytes) -> _Decoded:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit i of byte j belongs to value j
    of sub-block i."""
    scale, minimum = _k_scales(blocks)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> shifts & 1).reshape(-1, 256)
    return _Decoded(_k_nibbles(blocks[:, 48:], 32) | high << 4, scale, minimum)


def _decode_q6_k(blocks: Bytes) -> _Decoded:
    """| 128 bytes: low 4 bits | 64 bytes: high 2 bits | 16 int8 scales | d float16 |, 256 values.

    Sub-block i of 16 values: w = (q - 32) * (d * sc[i]). Each half of 128 values takes 64 bytes of
    nibbles (all low ones first) and 32 bytes whose bit pairs belong to four runs of 32 values.
    """
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 256)
    sub_scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _Decoded(_k_nibbles(blocks[:, :128], 64) | high << 4, _float16(blocks, 208) * sub_scales)


_BLOCK_TYPES = {
    "Q4_0": _BlockType(32, 18, TensorFormat("float16", 4, 32, zero_point=7), _decode_q4_0),
    "Q4_1": _BlockType(32, 20, TensorFormat("float16", 4, 32), _decode_q4_1),
    "Q5_0": _BlockType(32, 22, TensorFormat("float16", 5, 32, zero_point=16), _decode_q5_0),
    "Q5_1": _BlockType(32, 24, TensorFormat("float16", 5, 32), _decode_q5_1),
    "Q8_0": _BlockType(32, 34, TensorFormat("float16", 8, 32, zero_point=127), _decode_q8_0),
    "Q4_K": _BlockType(256, 144, TensorFormat("float32", 4, 32), _decode_q4_k),
    "Q5_K": _BlockType(256, 176, TensorFormat("float32", 5, 32), _decode_q5_k),
    "Q6_K": _BlockType(256, 210, TensorFormat("float32", 6, 16, zero_point=32), _decode_q6_k),
}


def _float16(blocks: Bytes, offset: int) -> Floats:
    """[num_blocks, 1] float32: the float16 at a byte offset of each block."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _halves(packed: Bytes) -> Bytes:
    """[num_blocks, 16] → [num_blocks, 32]: all low nibbles, then all high ones."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[num_blocks, 4] → [num_blocks, 32]: bit j of the little-end-first word, as value 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _k_nibbles(packed: Bytes, run: int) -> Bytes:
    """[num_blocks, 128] → [num_blocks, 256]: of each `run` bytes the low nibbles, then the high."""
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    return (runs >> np.array([[0], [4]], np.uint8) & 0x0F).reshape(-1, 256)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the 8 sub-blocks of Q4_K and Q5_K: two [num_blocks, 8] float32.

    byte 0..3    | S S | s s s s s s |    sub-scale j;    SS: bits 5:4 of sub-scale j + 4
    byte 4..7    | M M | m m m m m m |    sub-minimum j;  MM: bits 5:4 of sub-minimum j + 4
    byte 8..11   | n n n n | t t t t |    bits 3:0 of sub-minimum and sub-scale j + 4
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 0x3F, third & 0x0F | first >> 2 & 0x30), axis=1)
    minima = np.concatenate((second & 0x3F, third >> 4 | second >> 2 & 0x30), axis=1)
    return _float16(blocks, 0) * scales, -(_float16(blocks, 2) * minima)
