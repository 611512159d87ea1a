"""A model's parameters as its library takes them: packed once, kept beside the artifact.

The artifact holds portable tensors. A library that wants another layout says in its metadata
which function makes each parameter from which tensors. The results go into one file,

    <artifact>/.packed/<key>.bin      parameters one after another, each on a multiple of 64 bytes

whose key is a hash of the weights and of the library's list of parameters, so that it is never
stale. Loading it is one read into huge pages.
"""

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
from .runtime import Library, Tensor, as_array, as_tensor, huge_array

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
    key = hash_json([weights.weights_hash(), library.metadata["parameters"]])[:16]
    path = _packed_file(folder, key)
    if not path.is_file() or path.stat().st_size != num_bytes:
        check_sources(parameters, weights)
        weights.verify()
        _pack(path, parameters, num_bytes, library, weights, progress)
    memory = _read(path, num_bytes)
    if library.metadata["parameters_in_one_buffer"]:
        return [as_tensor(memory)]
    return [as_tensor(_view(memory, parameter)) for parameter in parameters]


def _packed_file(folder: Path, key: str) -> Path:
    """Beside the artifact, or in the user's cache where the artifact cannot be written to."""
    beside = folder / ".packed" / f"{key}.bin"
    if beside.is_file() or os.access(folder, os.W_OK):
        return beside
    return cache_dir() / "packed" / f"{key}.bin"


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
    parameters: Sequence[Parameter],
    num_bytes: int,
    library: Library,
    weights: TensorCacheReader,
    progress: Progress | None,
) -> None:
    """Write the packed file under a temporary name, one parameter at a time, then rename it."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                for parameter in parameters:
                    file.seek(parameter.offset)
                    file.write(_packed(parameter, library, weights).reshape(-1).view(np.uint8).data)
                    if progress is not None:
                        progress(parameter.offset + parameter.num_bytes, num_bytes)
                file.truncate(num_bytes)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
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


def _read(path: Path, num_bytes: int) -> np.ndarray:
    memory = huge_array(num_bytes)
    with path.open("rb") as file:
        if file.readinto(memory.data) != num_bytes:
            raise ArtifactError(f"{path} is cut short; delete it and start again")
    return memory


def _view(memory: np.ndarray, parameter: Parameter) -> np.ndarray:
    stored = memory[parameter.offset : parameter.offset + parameter.num_bytes]
    return stored.view(numpy_dtype(parameter.dtype)).reshape(parameter.shape)
