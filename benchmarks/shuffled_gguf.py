"""A GGUF as float32 with its channels in another order: a fair original to quantize.

The weights of a quantized GGUF lie on the grid of its own blocks, so a scheme whose groups are
those blocks finds the grid again and seems to lose nothing. Every decoder of ours computes the
same function whatever the order of the channels of its residual stream, of each MLP, and of each
value head (RMSNorm and the activations act on every channel alike). Shuffled, a group gathers
weights from as many blocks as it has members, as those of a float checkpoint are.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

_WRITTEN_BY_THE_WRITER = ("GGUF.", "general.architecture", "general.file_type")


def write_shuffled(source: Path, target: Path, *, seed: int = 0) -> None:
    """Write `source` (one of the decoders that everycast reads) as F32, shuffled, to `target`."""
    reader = gguf.GGUFReader(source)
    architecture = _value(reader, "general.architecture")
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_file_type(int(gguf.LlamaFileType.ALL_F32))
    for field in reader.fields.values():
        if not field.name.startswith(_WRITTEN_BY_THE_WRITER):
            value_type, *elements = field.types
            element = elements[-1] if elements else None
            writer.add_key_value(field.name, field.contents(), value_type, element)
    orders = Orders(reader, architecture, np.random.default_rng(seed))
    for tensor in reader.tensors:
        values = dequantize(np.asarray(tensor.data), tensor.tensor_type)
        # Written one by one, so that memory holds a tensor and not the model.
        writer.add_tensor_info(tensor.name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        values = dequantize(np.asarray(tensor.data), tensor.tensor_type)
        writer.write_tensor_data(orders.apply(tensor.name, values.astype(np.float32)))
    writer.close()


class Orders:
    """The new order of every axis that may be shuffled."""

    def __init__(self, reader: gguf.GGUFReader, architecture: str, rng: np.random.Generator):
        def number(name: str) -> int:
            return int(_value(reader, f"{architecture}.{name}"))

        hidden, layers = number("embedding_length"), number("block_count")
        heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
        o_proj = next(t for t in reader.tensors if t.name == "blk.0.attn_output.weight")
        head_dim = int(o_proj.shape[0]) // heads
        self.hidden = rng.permutation(hidden)
        self.wide = [rng.permutation(number("feed_forward_length")) for _ in range(layers)]
        self.values, self.attended = [], []
        for _ in range(layers):
            inner = [rng.permutation(head_dim) for _ in range(kv_heads)]
            self.values.append(_flat(inner))
            self.attended.append(_flat([inner[i * kv_heads // heads] for i in range(heads)]))

    def apply(self, name: str, values: np.ndarray) -> np.ndarray:
        """values: [out, in] or [size] float32, as the GGUF names it."""
        layer, module = 0, name.rpartition(".")[0]
        if module.startswith("blk."):
            _, block, module = module.split(".")
            layer = int(block)
        wide, value, attended = self.wide[layer], self.values[layer], self.attended[layer]
        everything = slice(None)
        orders: dict[str, tuple[Any, Any]] = {
            "token_embd": (everything, self.hidden),
            "output": (everything, self.hidden),
            "attn_q": (everything, self.hidden),
            "attn_k": (everything, self.hidden),
            "attn_v": (value, self.hidden),
            "attn_output": (self.hidden, attended),
            "ffn_gate": (wide, self.hidden),
            "ffn_up": (wide, self.hidden),
            "ffn_down": (self.hidden, wide),
            "attn_q_norm": (everything, everything),
            "attn_k_norm": (everything, everything),
            "rope_freqs": (everything, everything),
        }
        # The rest are norms of the residual stream.
        rows, columns = orders.get(module, (self.hidden, everything))
        shuffled = values[rows]
        return np.ascontiguousarray(shuffled[:, columns] if shuffled.ndim > 1 else shuffled)


def _flat(orders: list[np.ndarray]) -> np.ndarray:
    """One order for heads side by side, from one for each."""
    return np.concatenate([i * len(order) + order for i, order in enumerate(orders)])


def _value(reader: gguf.GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()
