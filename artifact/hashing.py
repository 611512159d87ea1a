"""Hashes of files, bytes and JSON values: SHA-256, and the MD5 that `tensor-cache.json` holds."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

_CHUNK_BYTES = 1 << 20


def hash_bytes(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hash_bytes(text.encode())


def hash_file(
    path: Path,
    algorithm: Literal["sha256", "md5"] = "sha256",
    *,
    progress: Callable[[int], None] | None = None,
) -> str:
    """The file's hash, hexadecimal; `progress` is called with the bytes of each piece read."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
            if progress is not None:
                progress(len(piece))
    return digest.hexdigest()
