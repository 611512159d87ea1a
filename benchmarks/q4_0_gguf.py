"""A GGUF's 4- and 5-bit matrices requantized to Q4_0, the format that llama.cpp decodes fastest.

Embedding and head, and whatever else is 8 bits or wider, stay as they are.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

WIDE = frozenset({"F32", "F16", "BF16", "Q8_0"})
_FILE_TYPE_Q4_0 = 2  # llama.cpp's LLAMA_FTYPE_MOSTLY_Q4_0
_WRITTEN_BY_THE_WRITER = ("GGUF.", "general.architecture", "general.file_type")


def write_q4_0(source: Path, target: Path) -> None:
    """Write `source` with every tensor that is narrower than 8 bits as Q4_0 to `target`.

    The rounding is `gguf`'s own, which equals llama.cpp's. Source and target must differ.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    temporary = target.with_name(f"{target.name}.part")
    writer = gguf.GGUFWriter(temporary, architecture)
    writer.add_file_type(_FILE_TYPE_Q4_0)
    for field in reader.fields.values():
        if not field.name.startswith(_WRITTEN_BY_THE_WRITER):
            _copy_field(writer, field)
    for tensor in reader.tensors:
        kind, data = tensor.tensor_type, np.asarray(tensor.data)
        if kind.name not in WIDE:
            kind = gguf.GGMLQuantizationType.Q4_0
            data = quantize(dequantize(data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(target)


def _copy_field(writer: gguf.GGUFWriter, field: Any) -> None:
    value_type, *element_type = field.types
    element = element_type[-1] if element_type else None
    writer.add_key_value(field.name, field.contents(), value_type, element)


def matrix_bytes(path: Path) -> tuple[int, int]:
    """Bytes and numbers of a GGUF's matrices, which are all that a quantization changes."""
    matrices = [t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1]
    return sum(int(t.n_bytes) for t in matrices), sum(int(t.n_elements) for t in matrices)


def num_block_parameters(path: Path) -> int:
    """Numbers in the matrices that multiply every token: all but embedding and head."""
    tensors = gguf.GGUFReader(path).tensors
    return sum(int(t.n_elements) for t in tensors if len(t.shape) > 1 and t.name[:4] == "blk.")


def num_head_parameters(path: Path) -> int:
    """Numbers of the head, which may be the embedding too."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    head = tensors.get("output.weight") or tensors["token_embd.weight"]
    return int(head.n_elements)
