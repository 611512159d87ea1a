"""Weight files on disk: told apart from what is not one, and mapped instead of read."""

import hashlib
from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...artifact.errors import CheckpointError

GIT_LFS_PREFIX = b"version https://git-lfs.github.com/spec/"


def quote(text: str) -> str:
    """A name read from a file, fit for a one-line message: quoted, escaped, at most 100 long."""
    shown = repr(text)
    return shown if len(shown) <= 100 else f"{shown[:97]}..."


def weight_file_size(path: Path) -> int:
    """Size in bytes of a readable weight file.

    Raises CheckpointError if it is missing, unreadable, not a file, empty or a git-lfs pointer.
    """
    if not path.is_file():
        state = "is not a file" if path.exists() else "is missing"
        raise CheckpointError(f"{path} {state}; fetch the whole checkpoint again")
    try:
        with path.open("rb") as file:
            start = file.read(len(GIT_LFS_PREFIX))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if start == GIT_LFS_PREFIX:
        raise CheckpointError(
            f"{path}: this is a git-lfs pointer, not the file itself; run `git lfs pull` there"
        )
    if not start:
        raise CheckpointError(f"{path} is empty; fetch it again")
    return path.stat().st_size


def map_array(
    path: Path, offset_bytes: int, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> np.ndarray:
    """Read-only array `dtype` [shape] over the file's bytes from `offset_bytes` on.

    The mapping lives as long as the array, so that reading a model tensor by tensor keeps one
    tensor in memory. Bytes that are not aligned for `dtype` are copied.

    Raises CheckpointError if the file ends before the array does.
    """
    item = np.dtype(dtype)
    num_bytes = prod(shape) * item.itemsize
    if num_bytes == 0:
        return np.empty(shape, item)
    try:
        mapped = np.memmap(path, np.uint8, mode="r", offset=offset_bytes, shape=(num_bytes,))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} can no longer be read up to byte {offset_bytes + num_bytes}: {error}"
        ) from error
    flat: np.ndarray = mapped.view(np.ndarray)
    if offset_bytes % item.alignment:
        flat = flat.copy()
    return flat.view(item).reshape(shape)


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256, in hex, over each file's name, size and modification time (not its content)."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        state = path.stat()
        digest.update(f"{path.name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()
