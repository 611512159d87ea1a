"""A model's parameters as its library takes them: packed once, kept beside the artifact.

The artifact holds portable tensors. A library that wants another layout says in its metadata
which function makes each parameter from which tensors. The results go into one file,
`<artifact>/.packed/<key>.bin` (`packed_file.py`), whose key is a hash of the weights and of the
library's list of parameters, so that it is never stale. Loading it is one read into huge pages; one
that was cut short or changed is made again.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..artifact.cache import cache_dir
from ..artifact.dtypes import numpy_dtype
from ..artifact.errors import ArtifactError
from ..artifact.files import disk_errors
from ..artifact.hashing import hash_json
from ..artifact.packed_layout import packed_offsets
from ..artifact.tensor_cache import TensorCacheReader, aligned_empty
from .packed_file import FORMAT_VERSION, PackedFileWriter, read_packed_file
from .runtime import Library, Tensor, as_array, as_tensor

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, `num_bytes` at `offset` of the packed file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    pack: str | None
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


def read_parameters(metadata: Mapping[str, Any]) -> tuple[list[Parameter], int]:
    """The library's parameters in call order, and the bytes of their packed file."""
    entries = metadata["parameters"]
    sizes = [math.prod(entry["shape"]) * numpy_dtype(entry["dtype"]).itemsize for entry in entries]
    offsets, num_bytes = packed_offsets(sizes)
    parameters = [
        Parameter(
            entry["name"],
            tuple(entry["shape"]),
            entry["dtype"],
            tuple(entry["sources"]),
            entry["pack"],
            offset,
        )
        for entry, offset in zip(entries, offsets, strict=True)
    ]
    return parameters, num_bytes


def load_parameters(
    folder: Path, library: Library, weights: TensorCacheReader, progress: Progress | None = None
) -> list[Tensor]:
    """Every parameter of `library`, from the packed file, which is made first if need be: as the
    one buffer that holds them all where the library takes that, else a tensor each.

    `progress(done, total)` is called with bytes while packing. Raises ArtifactError when a shard
    is corrupted (its hash is checked before packing) or a tensor is missing.
    """
    parameters, num_bytes = read_parameters(library.metadata)
    key = hash_json([FORMAT_VERSION, weights.weights_hash(), library.metadata["parameters"]])[:16]
    memory = _read(_packed_files(folder, key), key, num_bytes)
    if memory is None:
        check_sources(parameters, weights)
        weights.verify()
        path = _packed_files(folder, key)[0]
        _pack(path, key, parameters, num_bytes, library, weights, progress)
        memory = _read([path], key, num_bytes)
    if memory is None:
        raise ArtifactError(f"{path} is not what was just written; check the disk")
    if library.metadata["parameters_in_one_buffer"]:
        return [as_tensor(memory)]
    return [as_tensor(_view(memory, parameter)) for parameter in parameters]


def _packed_files(folder: Path, key: str) -> list[Path]:
    """Where it may lie, first where it is written to: beside the artifact, or in the user's cache
    where the artifact cannot be written to."""
    beside = folder / ".packed" / f"{key}.bin"
    if os.access(folder, os.W_OK):
        return [beside]
    return [cache_dir() / "packed" / beside.name, beside]


def _read(paths: Sequence[Path], key: str, num_bytes: int) -> np.ndarray | None:
    """The parameters, from the first of these files that can be read and is whole."""
    for path in paths:
        if not path.is_file():
            continue
        try:
            memory = read_packed_file(path, key, num_bytes)
            reason = "is not what was written"
        except OSError as error:
            memory, reason = None, f"cannot be read ({error.strerror or error})"
        if memory is not None:
            return memory
        logger.warning("%s %s; its weights are packed again", path, reason)
    return None


def check_sources(parameters: Sequence[Parameter], weights: TensorCacheReader) -> None:
    """ArtifactError unless every tensor is there, in the form that the library takes as it is."""
    missing = [s for parameter in parameters for s in parameter.sources if s not in weights]
    if missing:
        raise ArtifactError(
            f"{weights.folder} lacks {len(missing)} tensors that its library needs: "
            f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}; build it again"
        )
    for parameter in parameters:
        if parameter.pack is None:
            stored = weights.info(parameter.sources[0])
            if (stored.shape, stored.dtype) != (parameter.shape, parameter.dtype):
                raise ArtifactError(
                    f"{weights.folder} has {parameter.name} as {stored.dtype} {stored.shape}, but "
                    f"its library takes {parameter.dtype} {parameter.shape}; compile it again"
                )


def _pack(
    path: Path,
    key: str,
    parameters: Sequence[Parameter],
    num_bytes: int,
    library: Library,
    weights: TensorCacheReader,
    progress: Progress | None,
) -> None:
    """Write the packed file, one parameter at a time."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with PackedFileWriter(path, key, num_bytes) as file:
            for parameter in parameters:
                file.write(parameter.offset, _packed(parameter, library, weights))
                if progress is not None:
                    progress(parameter.offset + parameter.num_bytes, num_bytes)
    for stale in path.parent.glob("*.bin"):
        if path.parent.name == ".packed" and stale != path:
            stale.unlink(missing_ok=True)


def _packed(parameter: Parameter, library: Library, weights: TensorCacheReader) -> np.ndarray:
    sources = [weights.read(name) for name in parameter.sources]
    if parameter.pack is None:
        (array,) = sources
        return np.ascontiguousarray(array)
    tensors = []
    for source in sources:
        # A private copy: DLPack refuses read-only arrays.
        copy = aligned_empty(source.shape, source.dtype)
        copy[...] = source
        tensors.append(as_tensor(copy))
    try:
        return as_array(library.function(parameter.pack)(*tensors))
    except Exception as error:  # TVM checks shapes and dtypes of the arguments
        reason = "".join(str(error).strip().splitlines()[-1:])
        raise ArtifactError(
            f"{', '.join(parameter.sources)} of {weights.folder} do not fit the library: {reason}; "
            "compile it again"
        ) from error


def _view(memory: np.ndarray, parameter: Parameter) -> np.ndarray:
    stored = memory[parameter.offset : parameter.offset + parameter.num_bytes]
    return stored.view(numpy_dtype(parameter.dtype)).reshape(parameter.shape)
