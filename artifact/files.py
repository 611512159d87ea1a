"""Writing so that a reader, or a crash, never meets half a file or half a folder."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ArtifactError, CapacityError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an OSError while `path` is written into one clear line: CapacityError if the disk is
    full, else ArtifactError."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            free = _free_bytes(path)
            raise CapacityError(
                f"no room to write {path}: {free / 1e6:.0f} MB free there; make room or choose "
                f"another folder"
            ) from error
        raise ArtifactError(f"cannot write {path}: {error.strerror or error}") from error


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file under a temporary name beside it, flush it to disk, then rename it."""
    temporary = _sibling(path)
    with disk_errors(path):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new, empty folder to fill; at the end it is flushed to disk and takes the name `path`.

    A folder that had the name stays whole until then and is removed afterwards. If the block
    raises, nothing remains of the new folder.
    """
    temporary = _sibling(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    try:
        yield temporary
        with disk_errors(path):
            for entry in sorted(temporary.rglob("*")):
                _sync(entry)
            _sync(temporary)
            _take_name(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _take_name(temporary: Path, path: Path) -> None:
    """A folder that is not empty cannot be replaced in one step, so the old one steps aside."""
    old = _sibling(path)
    replaces = path.exists()
    if replaces:
        path.rename(old)
    try:
        temporary.rename(path)
    except BaseException:
        if replaces:
            old.rename(path)
        raise
    _sync(path.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def _sibling(path: Path) -> Path:
    return path.with_name(f".{path.name[:32]}.{secrets.token_hex(6)}.tmp")


def _sync(path: Path) -> None:
    if os.name == "nt":  # there, only what is open for writing can be flushed
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_bytes(path: Path) -> int:
    """Free bytes on the disk that holds `path` or its nearest folder that exists."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
