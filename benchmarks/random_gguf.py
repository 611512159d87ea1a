"""Writes a GGUF of random weights in the shape of a real model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from .shapes import Shape
from .workers import BenchError

CONTEXT = 8192
NUMBERS_PER_BLOCK = 32
BLOCK_BYTES = {Type.Q4_0: 18, Type.Q8_0: 34}
_STEPS = {Type.Q4_0: 4.6, Type.Q8_0: 73.9}
"""Standard deviation of a block's random integers."""
_FILE_TYPE_Q4_0 = 2  # llama.cpp's LLAMA_FTYPE_MOSTLY_Q4_0

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    """Rows, columns; or the length of a norm."""
    type: Type

    @property
    def num_bytes(self) -> int:
        if self.type == Type.F32:
            return 4 * self.shape[0]
        return self.shape[0] * self.shape[1] // NUMBERS_PER_BLOCK * BLOCK_BYTES[self.type]


def _tensors(shape: Shape) -> Iterator[_Tensor]:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield _Tensor("token_embd.weight", (shape.vocab_size, hidden), Type.Q8_0)
    matrices = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (wide, hidden),
        "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if shape.has_head_norms:
        norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    for layer in range(shape.num_layers):
        for name, size in matrices.items():
            yield _Tensor(f"blk.{layer}.{name}.weight", size, Type.Q4_0)
        for name, length in norms.items():
            yield _Tensor(f"blk.{layer}.{name}.weight", (length,), Type.F32)
    yield _Tensor("output_norm.weight", (hidden,), Type.F32)
    if not shape.is_tied:
        yield _Tensor("output.weight", (shape.vocab_size, hidden), Type.Q8_0)


def borrowed_tokenizer(path: Path) -> dict[str, Any]:
    """The tokenizer of a GGUF, by the names of its metadata."""
    fields = gguf.GGUFReader(path).fields
    return {
        name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")
    }


def write_random(
    shape: Shape, name: str, tokenizer: Mapping[str, Any], target: Path, progress: Progress
) -> None:
    """Write random weights as a GGUF: matrices Q4_0; embedding and head Q8_0 (llama.cpp's own
    Q4_0 files have Q6_K there, a little smaller), norms 1. Memory stays near the largest tensor.

    tokenizer: as `borrowed_tokenizer` gives it, of no more tokens than the shape has; names are
    made up for the rest. The file has its name only when it is whole.
    """
    temporary = target.with_name(f"{target.name}.part")
    writer = gguf.GGUFWriter(temporary, shape.architecture)
    try:
        _add_metadata(writer, shape, name, tokenizer)
        tensors = list(_tensors(shape))
        for tensor in tensors:
            is_float = tensor.type == Type.F32
            writer.add_tensor_info(
                tensor.name,
                tensor.shape,
                np.dtype(np.float32 if is_float else np.float16),
                tensor.num_bytes,
                None if is_float else tensor.type,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        generator = np.random.default_rng(0)
        total = sum(tensor.num_bytes for tensor in tensors)
        done = 0
        for tensor in tensors:
            writer.write_tensor_data(_values(tensor, generator))
            done += tensor.num_bytes
            progress(done, total)
        writer.close()
        temporary.replace(target)
    except BaseException:
        writer.close()
        temporary.unlink(missing_ok=True)
        raise


def _values(tensor: _Tensor, generator: np.random.Generator) -> np.ndarray:
    """Numbers of a size that keeps the activations near 1 through all layers."""
    if tensor.type == Type.F32:
        return np.ones(tensor.shape, np.float32)
    blocks = np.frombuffer(generator.bytes(tensor.num_bytes), np.uint8).copy()
    blocks = blocks.reshape(-1, BLOCK_BYTES[tensor.type])
    scale = np.float16(1 / (_STEPS[tensor.type] * tensor.shape[1] ** 0.5))
    blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks


def _add_metadata(
    writer: gguf.GGUFWriter, shape: Shape, name: str, tokenizer: Mapping[str, Any]
) -> None:
    writer.add_name(f"{name}, random weights")
    writer.add_file_type(_FILE_TYPE_Q4_0)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    values = dict(tokenizer)
    tokens = values.pop("tokenizer.ggml.tokens")
    types = values.pop("tokenizer.ggml.token_type")
    num_missing = shape.vocab_size - len(tokens)
    if num_missing < 0:
        raise BenchError(f"{len(tokens)} tokens are more than the shape's {shape.vocab_size}")
    writer.add_token_list([*tokens, *(f"<unused{i}>" for i in range(num_missing))])
    writer.add_token_types([*types, *[gguf.TokenType.NORMAL] * num_missing])
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
