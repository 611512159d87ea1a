"""What every checkpoint reader offers, whatever the file format."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

FLOAT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the checkpoint. `shape` is in row-major order, [out, in] for a matrix.

    `dtype` is `F32`, `F16`, `BF16` or a GGUF block type such as `Q4_1`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class Checkpoint(Protocol):
    """A model on disk, read one tensor at a time (peak memory is near the largest tensor)."""

    kind: Literal["huggingface", "gguf"]
    path: Path
    config: Mapping[str, Any]
    """`config.json` of a Hugging Face folder, or the metadata of a GGUF (plain Python values)."""
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """The tensor: float32 / float16 / ml_dtypes.bfloat16 [shape] for a float dtype, else the
        raw blocks as uint8 [rows, bytes per row]. A fresh or memory-mapped array, never cached.

        Raises CheckpointError if the tensor is truncated or missing."""
        ...

    def source_hash(self) -> str:
        """Hash over names, sizes and modification times: changes when the files do."""
        ...
