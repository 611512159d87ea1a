"""The file of packed parameters, with a check that is fast enough for every load.

    parameters   one after another, each on a multiple of 64 bytes
    digest       32 bytes: BLAKE2b of the blocks' sums, keyed with the file's key

A block is 512 words of 64 bits. Its sum is Σ weightᵢ · wordᵢ modulo 2⁶⁴ with fixed random odd
weights (the multilinear hash of Carter and Wegman, "Universal classes of hash functions", 1979):
any change of one word is found, of several all but one in 2⁶⁴, and NumPy computes it as fast as
memory is read, ten times as fast as BLAKE2b would be on all the bytes.
"""

import hashlib
import os
from pathlib import Path
from typing import Self

import numpy as np

from .runtime import huge_array

FORMAT_VERSION = 2
"""Part of every key, so that a file of another version is no file of this one. Version 1 had no
digest."""

_BLOCK_WORDS = 512
_BLOCK_BYTES = 8 * _BLOCK_WORDS
_DIGEST_BYTES = 32
_PIECE_BYTES = 1 << 22
"""What the writer sums at a time, so that it copies no whole parameter."""
_WEIGHTS = np.random.default_rng(1979).integers(2**63, size=_BLOCK_WORDS, dtype=np.uint64) * 2 + 1


class PackedFileWriter:
    """A context manager that writes a file under a temporary name and renames it at the end;
    if the block raises, nothing remains. Raises OSError."""

    def __init__(self, path: Path, key: str, num_bytes: int) -> None:
        """key: what the file is of; num_bytes: of all parameters, with what lies between."""
        self._path, self._key, self._num_bytes = path, key, num_bytes
        self._temporary = path.with_suffix(f".{os.getpid()}.tmp")
        self._sums = np.zeros(-(-num_bytes // _BLOCK_BYTES), np.uint64)

    def write(self, offset: int, array: np.ndarray) -> None:
        """Put a contiguous array at a byte that nothing was written to yet."""
        data = array.reshape(-1).view(np.uint8)
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            block, lead = divmod(offset + start, _BLOCK_BYTES)
            padded = np.zeros(_whole_blocks(lead + len(piece)), np.uint8)
            padded[lead : lead + len(piece)] = piece
            sums = _block_sums(padded)
            self._sums[block : block + len(sums)] += sums
        self._file.seek(offset)
        self._file.write(data.data)

    def __enter__(self) -> Self:
        self._file = self._temporary.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.seek(self._num_bytes)
                    self._file.write(_digest(self._sums, self._key))
            if kind is None:
                self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)


def read_packed_file(path: Path, key: str, num_bytes: int) -> np.ndarray | None:
    """The `num_bytes` of parameters in huge pages, [num_bytes] uint8; None unless the file is
    whole, what was written, and of this key. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != num_bytes + _DIGEST_BYTES:
            return None
        memory = huge_array(_whole_blocks(num_bytes))
        if file.readinto(memory[:num_bytes].data) != num_bytes:
            return None
        if file.read() != _digest(_block_sums(memory), key):
            return None
    return memory[:num_bytes]


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _block_sums(data: np.ndarray) -> np.ndarray:
    """[num_blocks] uint64 of whole blocks of bytes."""
    # Not `@`: for integers it is a third slower.
    sums: np.ndarray = np.einsum("ij,j->i", data.view("<u8").reshape(-1, _BLOCK_WORDS), _WEIGHTS)
    return sums


def _digest(sums: np.ndarray, key: str) -> bytes:
    return hashlib.blake2b(sums.tobytes(), digest_size=_DIGEST_BYTES, key=key.encode()).digest()
