"""Weights are hashed when a machine first loads them, not at every load.

What was found right is noted in a file beside the artifact (in the user's cache where that cannot
be written to), by each shard's inode, size and time of change: a shard that is another file, or was
written to since, is hashed again.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ..artifact.cache import cache_dir
from ..artifact.errors import EverycastError
from ..artifact.files import atomic_write
from ..artifact.tensor_cache import TensorCacheReader

_NAME = "verified.json"


def verify_once(weights: TensorCacheReader) -> None:
    """Hash the shards unless all were found right before. Raises ArtifactError naming one that is
    corrupted or missing."""
    path, state = _record_file(weights), _state(weights)
    if state is not None and _read(path) == state:
        return
    weights.verify()
    with contextlib.suppress(OSError, EverycastError):  # else hashed again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(state).encode())


def _state(weights: TensorCacheReader) -> dict[str, Any] | None:
    """What a shard's bytes cannot change without; None if one is missing."""
    state: dict[str, Any] = {"weights": weights.weights_hash()}
    for shard in weights.shards.values():
        try:
            status = (weights.folder / shard.file).stat()
        except OSError:
            return None
        state[shard.file] = [status.st_ino, status.st_size, status.st_mtime_ns]
    return state


def _record_file(weights: TensorCacheReader) -> Path:
    if os.access(weights.folder, os.W_OK):
        return weights.folder / ".packed" / _NAME
    return cache_dir() / "verified" / f"{weights.weights_hash()[:16]}.json"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
