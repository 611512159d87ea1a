"""The header of one GGUF file: metadata and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. All numbers are little endian:

    magic "GGUF" | version u32 | tensor_count u64 | metadata_count u64
    metadata_count * (key: string | value type u32 | value)
    tensor_count   * (name: string | num_dims u32 | dims u64[num_dims], K first | type u32 |
                      offset u64, from the start of the data)
    padding to a multiple of general.alignment | tensor data

    string = length u64 | UTF-8 bytes;   array = item type u32 | count u64 | items

The PyPI reader builds an object for every token of the vocabulary, which takes seconds; this one
opens a vocabulary of 262k in well under a second. Tests hold the two against each other.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...artifact.errors import CheckpointError
from .mapped_file import quote, weight_file_size
from .source import TensorInfo

SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
# No tokenizer comes near; keeps a damaged count from filling the memory.
MAX_ARRAY_ITEMS = 1 << 24
MAX_ARRAY_DEPTH = 4

# Type number → (name, values per block, bytes per block). ggml.h, `enum ggml_type`.
BLOCK_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# Types that exist but that nothing here can unpack: known so that the error can name them.
UNSUPPORTED_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}

_SCALAR_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING = 8
_ARRAY = 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata as plain Python values; tensors with their absolute offsets in the file, bytes."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    offsets_bytes: dict[str, int]


class _Cursor:
    """Reads values from a mapped file, one after the other; IndexError past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def scalars(self, item_format: str, count: int) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{item_format}")
        start, self.position = self.position, self.position + layout.size
        if self.position > len(self.data):
            raise IndexError
        return layout.unpack_from(self.data, start)

    def number(self, item_format: str) -> Any:
        return self.scalars(item_format, 1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings. The one loop that runs once a token, hence plain locals."""
        data, position, size = self.data, self.position, len(self.data)
        result = []
        for _ in range(count):
            start = position + 8
            if start > size:
                raise IndexError
            position = start + _LENGTH.unpack_from(data, start - 8)[0]
            if position > size:
                raise IndexError
            result.append(data[start:position].decode())
        self.position = position
        return result

    def value(self, value_type: int, depth: int = 0) -> Any:
        """A metadata value. ValueError, with a text for the user, if the type is not known."""
        if value_type in _SCALAR_FORMATS:
            return self.number(_SCALAR_FORMATS[value_type])
        if value_type == _STRING:
            return self.strings(1)[0]
        if value_type != _ARRAY:
            raise ValueError(f"has value type {value_type}, which GGUF does not define")
        item_type, count = self.number("I"), self.number("Q")
        if count > MAX_ARRAY_ITEMS:
            raise ValueError(f"is an array of {count} items; allowed: {MAX_ARRAY_ITEMS}")
        if depth == MAX_ARRAY_DEPTH:
            raise ValueError(f"nests arrays more than {MAX_ARRAY_DEPTH} deep")
        if item_type in _SCALAR_FORMATS:
            return list(self.scalars(_SCALAR_FORMATS[item_type], count))
        if item_type == _STRING:
            return self.strings(count)
        return [self.value(item_type, depth + 1) for _ in range(count)]


def read_header(path: Path) -> GGUFHeader:
    """Parse and check the header of the GGUF file at `path`; no tensor data is read.

    Raises CheckpointError if the file is not a whole GGUF of a supported version, or holds a
    tensor of a type that is not supported.
    """
    size = weight_file_size(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise CheckpointError(
                f"{path} is not a GGUF file: it starts with {data[:4]!r}, not b'GGUF'"
            )
        cursor = _Cursor(data)
        cursor.position = 4
        try:
            version = _read_version(cursor, path)
            num_tensors, num_values = cursor.scalars("Q", 2)
            metadata = _read_metadata(cursor, num_values, path)
            alignment = _alignment(metadata, path)
            tensors, relative = _read_tensor_infos(cursor, num_tensors, path)
        except IndexError:
            raise CheckpointError(
                f"{path} is truncated or damaged: its header does not end within the file's "
                f"{size} bytes; fetch it again"
            ) from None
        start = -(-cursor.position // alignment) * alignment

    offsets = {name: start + offset for name, offset in relative.items()}
    for name, info in tensors.items():
        if relative[name] % alignment:
            raise CheckpointError(
                f"{path} is damaged: tensor {quote(name)} is not aligned to {alignment} bytes"
            )
        if offsets[name] + info.num_bytes > size:
            raise CheckpointError(
                f"{path} is truncated: it has {size} bytes, tensor {quote(name)} ends at byte "
                f"{offsets[name] + info.num_bytes}; fetch it again"
            )
    return GGUFHeader(version, metadata, tensors, offsets)


def _read_version(cursor: _Cursor, path: Path) -> int:
    version: int = cursor.number("I")
    if version in SUPPORTED_VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    kind = (
        f"big-endian GGUF version {swapped}"
        if swapped in SUPPORTED_VERSIONS
        else (f"GGUF version {version}")
    )
    raise CheckpointError(f"{path}: {kind} is not supported; supported: 2 and 3, little endian")


def _read_metadata(cursor: _Cursor, count: int, path: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = f"number {index}"
        try:
            key = quote(name := cursor.strings(1)[0])
            value = cursor.value(cursor.number("I"))
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: metadata {key} is not valid UTF-8") from None
        except ValueError as error:
            raise CheckpointError(f"{path}: metadata {key} {error}") from None
        if name in metadata:
            raise CheckpointError(f"{path}: metadata {key} is there twice")
        metadata[name] = value
    return metadata


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: general.alignment is {quote(str(alignment))}; it must be a power of two"
        )
    return alignment


def _read_tensor_infos(
    cursor: _Cursor, count: int, path: Path
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    unsupported: dict[str, str] = {}
    for index in range(count):
        try:
            name = cursor.strings(1)[0]
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: name of tensor {index} is not valid UTF-8") from None
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {quote(name)} is there twice")
        num_dims = cursor.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise CheckpointError(
                f"{path}: tensor {quote(name)} has {num_dims} dimensions; allowed: 1 to {MAX_DIMS}"
            )
        shape = cursor.scalars("Q", num_dims)[::-1]
        type_number = cursor.number("I")
        offsets[name] = cursor.number("Q")
        if type_number not in BLOCK_TYPES:
            type_name = UNSUPPORTED_TYPES.get(type_number, f"number {type_number}")
            unsupported[name] = type_name
            continue
        type_name, block_values, block_bytes = BLOCK_TYPES[type_number]
        if 0 in shape or shape[-1] % block_values:
            raise CheckpointError(
                f"{path}: tensor {quote(name)} of type {type_name} has shape {list(shape)}; its "
                f"last dimension must be a multiple of {block_values}, and none may be 0"
            )
        num_bytes = prod(shape) // block_values * block_bytes
        tensors[name] = TensorInfo(name, shape, type_name, num_bytes)
    if unsupported:
        name, type_name = next(iter(unsupported.items()))
        more = f" (and {len(unsupported) - 1} more tensors)" if len(unsupported) > 1 else ""
        supported = ", ".join(supported for supported, _, _ in BLOCK_TYPES.values())
        raise CheckpointError(
            f"{path}: tensor {quote(name)}{more} has type {type_name}, which is not supported; "
            f"supported: {supported}"
        )
    return tensors, offsets
