"""GGUF files as checkpoints: one file, or the parts of a split one."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ...artifact.errors import CheckpointError
from .gguf_header import GGUFHeader, read_header
from .mapped_file import hash_files, map_array, quote, weight_file_size
from .source import TensorInfo

_FLOATS: Mapping[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
# The naming of llama.cpp's gguf-split: model-00001-of-00003.gguf.
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def split_parts(path: Path) -> list[Path]:
    """All the files that make up the GGUF at `path`, in order, whether or not they exist."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    if not 1 <= int(match["part"]) <= count:
        raise CheckpointError(
            f"{path} is named as part {int(match['part'])} of {count}; restore its original name"
        )
    return [
        path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)
    ]


class GGUFCheckpoint:
    """The `Checkpoint` in a GGUF file; any part of a split one opens the whole.

    Raises CheckpointError if a part is missing, damaged, or holds a tensor type that is not
    supported. Tensors are checked against the size of their file here, not when they are read.
    """

    kind: Literal["huggingface", "gguf"] = "gguf"

    def __init__(self, path: Path) -> None:
        weight_file_size(path)  # a wrong path is reported as such, not as a missing part
        self._parts = split_parts(path)
        missing = [part.name for part in self._parts if not part.exists()]
        if missing:
            raise CheckpointError(
                f"{path} is one of {len(self._parts)} parts; missing beside it: "
                f"{', '.join(missing[:10])}{' ...' if len(missing) > 10 else ''}"
            )
        self.path = self._parts[0]
        headers = [read_header(part) for part in self._parts]
        self.config: Mapping[str, Any] = headers[0].metadata
        self._check_split(headers)
        tensors: dict[str, TensorInfo] = {}
        self._locations: dict[str, tuple[Path, int]] = {}
        for part, header in zip(self._parts, headers, strict=True):
            twice = sorted(tensors.keys() & header.tensors.keys())
            if twice:
                raise CheckpointError(
                    f"{part}: tensor {quote(twice[0])} is in another part as well"
                )
            tensors.update(header.tensors)
            for name, offset in header.offsets_bytes.items():
                self._locations[name] = (part, offset)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def _check_split(self, headers: list[GGUFHeader]) -> None:
        """Does what the files say of themselves (keys `split.*`) agree with their names?"""
        for index, (part, header) in enumerate(zip(self._parts, headers, strict=True)):
            number = header.metadata.get("split.no", index)
            count = header.metadata.get("split.count", 0) or len(headers)
            if (number, count) != (index, len(headers)):
                raise CheckpointError(
                    f"{part} says it is part {quote(str(number))} (from 0) of {quote(str(count))}; "
                    "restore the original names, such as model-00001-of-00003.gguf"
                )
        expected = self.config.get("split.tensors.count") if len(headers) > 1 else None
        found = sum(len(header.tensors) for header in headers)
        if expected is not None and expected != found:
            raise CheckpointError(
                f"{self.path}: its {len(headers)} parts hold {found} tensors, split.tensors.count "
                f"says {quote(str(expected))}; fetch all parts again"
            )

    def read(self, name: str) -> np.ndarray:
        """Memory-mapped tensor: float32 / float16 / bfloat16 [shape], or its blocks as uint8
        [rows, bytes per row], rows being the product of all dimensions but the last.

        Raises CheckpointError if there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {quote(name)}")
        info = self.tensors[name]
        path, offset = self._locations[name]
        if info.dtype in _FLOATS:
            return map_array(path, offset, info.shape, _FLOATS[info.dtype])
        rows = prod(info.shape[:-1])
        return map_array(path, offset, (rows, info.num_bytes // rows), np.uint8)

    def source_hash(self) -> str:
        return hash_files(self._parts)
