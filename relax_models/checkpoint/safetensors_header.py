"""The header of one safetensors file: where each tensor lies.

Format: https://huggingface.co/docs/safetensors/index#format

    header length u64, little endian | JSON header, UTF-8 | tensor data, no gaps

    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {}}

Read here rather than with the PyPI library, because tensors are mapped one at a time, and because
a truncated download deserves a message with numbers in it. Tests hold the two against each other.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...artifact.errors import CheckpointError
from .mapped_file import quote, weight_file_size
from .source import TensorInfo

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Tensors of a file, with their absolute offsets in it, in bytes."""

    tensors: dict[str, TensorInfo]
    offsets_bytes: dict[str, int]


def read_header(path: Path) -> SafetensorsHeader:
    """Parse and check the header of the safetensors file at `path`; no tensor data is read.

    Raises CheckpointError if the file is missing, truncated, damaged or of another kind.
    """
    size = weight_file_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file, or is damaged at its start")
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is truncated: it has {size} bytes, its header alone takes {8 + length}; "
                "fetch it again"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)

    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    ranges: list[tuple[int, int]] = []
    for name, entry in header.items():
        info, begin = _tensor_info(path, name, entry)
        tensors[name] = info
        offsets[name] = 8 + length + begin
        ranges.append((begin, begin + info.num_bytes))
    end = 0
    for begin, tensor_end in sorted(ranges):
        if begin != end:
            raise CheckpointError(
                f"{path} is damaged: its tensors overlap or leave a gap at byte {8 + length + end}"
            )
        end = tensor_end
    if size != 8 + length + end:
        state = "truncated" if size < 8 + length + end else "damaged"
        raise CheckpointError(
            f"{path} is {state}: it has {size} bytes, its header promises {8 + length + end}; "
            "fetch it again"
        )
    return SafetensorsHeader(tensors, offsets)


def _tensor_info(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    """The tensor that a header entry describes, and where it begins in the data, in bytes."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CheckpointError(f"{path} is damaged: header entry {quote(name)} is not complete")
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {quote(name)} has unknown dtype {quote(dtype)}")
    if not all(type(dim) is int and dim >= 0 for dim in shape) or not 0 <= begin <= end:
        raise CheckpointError(
            f"{path} is damaged: tensor {quote(name)} has shape {quote(str(shape))} at bytes "
            f"{begin} to {end}"
        )
    if (end - begin) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        raise CheckpointError(
            f"{path} is damaged: tensor {quote(name)}, {dtype} {quote(str(shape))}, does not take "
            f"{end - begin} bytes"
        )
    return TensorInfo(name, tuple(shape), dtype, end - begin), begin
