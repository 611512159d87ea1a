"""Unsigned integers of 3, 4, 5, 6 or 8 bits, packed little end first along K into uint32 words.

Bit 0 is the right-most of each picture; value 0 has the smallest k.

    8 bits   |  value 3  |  value 2  |  value 1  |  value 0  |              4 values a word
             31        24          16           8           0

    4 bits   | v7 | v6 | v5 | v4 | v3 | v2 | v1 | v0 |                      8 values a word
             31  28   24   20   16   12    8    4   0

    3 bits   |00| v9 | v8 | v7 | v6 | v5 | v4 | v3 | v2 | v1 | v0 |         10 values a word,
             31 30  27   24   21   18   15   12    9    6    3   0         2 bits unused

    5 bits   q_weight: the low 4 bits, as above
             q_high:   bit 4 of 32 values  |v31|v30| ... | v1| v0|          32 values a word

    6 bits   q_weight: the low 4 bits, as above
             q_high:   bits 5:4 of 16 values  |v15|v14| ... | v1| v0|       16 values a word

The layout "NK" stores [N, words along K]; "KN" stores the transpose of the same words.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..artifact.tensor_format import Shape, TensorFormat

Bytes = np.ndarray  # uint8, which NumPy's stubs lose at the first shift
Words = npt.NDArray[np.uint32]
# Shifts move bits across the bytes of a wider integer, so its byte order must be given.
_U16 = np.dtype("<u2")
_U32 = np.dtype("<u4")
_PACKED = ("q_weight", "q_high")


def pack_values(q: Bytes, fmt: TensorFormat) -> dict[str, np.ndarray]:
    """The parts `q_weight` (and `q_high`) of q: [N, K] uint8, each value below 2**bits.

    K is filled up to a multiple of the group with q = 0. Such a column means nothing (its weight
    is not zero): readers stop at K. ValueError if a value is too large.
    """
    bits = _bits(fmt)
    if q.size and int(q.max()) >> bits:
        raise ValueError(f"value {int(q.max())} does not fit in {bits} bits")
    n, k = q.shape
    padded = np.zeros((n, fmt.padded_k(k)), np.uint8)
    padded[:, :k] = q
    if bits == 8:
        parts = {"q_weight": _words(padded)}
    elif bits == 3:
        parts = {"q_weight": _pack_3_bits(padded)}
    else:
        parts = {"q_weight": _pack_4_bits(padded & 0x0F)}
        if bits == 5:
            parts["q_high"] = _words(np.packbits(padded >> 4, axis=1, bitorder="little"))
        elif bits == 6:
            parts["q_high"] = _pack_2_bits(padded >> 4)
    return {part: to_layout(words, fmt) for part, words in parts.items()}


def unpack_values(parts: Mapping[str, np.ndarray], fmt: TensorFormat, n: int, k: int) -> Bytes:
    """The values of a [n, k] weight: [n, k] uint8. The inverse of `pack_values`.

    ValueError if a part is missing or has another shape or dtype than `fmt.parts(n, k)`.
    """
    bits = _bits(fmt)
    expected = fmt.parts(n, k)
    check_parts(parts, {part: expected[part] for part in _PACKED if part in expected})
    low = _bytes(from_layout(parts["q_weight"], fmt))
    if bits == 8:
        return low[:, :k]
    if bits == 3:
        return _unpack_3_bits(low.view(_U32), fmt.padded_k(k))[:, :k]
    q = _unpack_4_bits(low)
    if bits == 5:
        high = _bytes(from_layout(parts["q_high"], fmt))
        q |= np.unpackbits(high, axis=1, bitorder="little") << 4
    elif bits == 6:
        q |= _unpack_2_bits(_bytes(from_layout(parts["q_high"], fmt))) << 4
    return q[:, :k]


def check_parts(parts: Mapping[str, np.ndarray], expected: Mapping[str, tuple[Shape, str]]) -> None:
    """ValueError unless `parts` holds what `TensorFormat.parts` promises."""
    for part, (shape, dtype) in expected.items():
        if part not in parts:
            raise ValueError(f"part {part} is missing; there are: {', '.join(parts)}")
        array = parts[part]
        if array.shape != shape or array.dtype.name != dtype:
            raise ValueError(
                f"part {part} is {array.dtype.name} {array.shape}, expected {dtype} {shape}"
            )


def to_layout(rows: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """[N, columns] in the order the format stores, contiguous."""
    return np.ascontiguousarray(rows.T) if fmt.layout == "KN" else rows


def from_layout(stored: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """The inverse of `to_layout`: [N, columns], contiguous."""
    return np.ascontiguousarray(stored.T if fmt.layout == "KN" else stored)


def _bits(fmt: TensorFormat) -> int:
    if fmt.bits is None:
        raise ValueError(f"a {fmt.dtype} weight has no packed values")
    per_high_word = 32 // (fmt.bits - 4) if fmt.bits in (5, 6) else 1
    if fmt.group_size % fmt.values_per_word or fmt.group_size % per_high_word:
        raise ValueError(f"groups of {fmt.group_size} do not fill words of {fmt.bits}-bit values")
    return fmt.bits


def _words(packed: Bytes) -> Words:
    return packed.view(_U32).astype(np.uint32, copy=False)


def _bytes(words: np.ndarray) -> Bytes:
    return words.astype(_U32, copy=False).view(np.uint8)


def _pack_4_bits(q: Bytes) -> Words:
    pairs = q.view(_U16)
    return _words((pairs | pairs >> 4).astype(np.uint8))


def _unpack_4_bits(packed: Bytes) -> Bytes:
    pairs = packed.astype(_U16)
    return ((pairs | pairs << 4) & 0x0F0F).view(np.uint8)


def _pack_2_bits(q: Bytes) -> Words:
    quads = q.view(_U32)
    return _words((quads | quads >> 6 | quads >> 12 | quads >> 18).astype(np.uint8))


def _unpack_2_bits(packed: Bytes) -> Bytes:
    quads = packed.astype(_U32)
    return ((quads | quads << 6 | quads << 12 | quads << 18) & 0x03030303).view(np.uint8)


def _pack_3_bits(q: Bytes) -> Words:
    tens = q.reshape(q.shape[0], -1, 10)
    words = np.zeros(tens.shape[:2], np.uint32)
    for i in range(10):
        words |= tens[:, :, i].astype(np.uint32) << np.uint32(3 * i)
    return words


def _unpack_3_bits(words: np.ndarray, padded_k: int) -> Bytes:
    q = np.empty((*words.shape, 10), np.uint8)
    for i in range(10):
        q[:, :, i] = (words >> np.uint32(3 * i)) & 7
    return q.reshape(words.shape[0], padded_k)
