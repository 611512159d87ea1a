"""Makes a model for ONNX Runtime GenAI out of a Llama-like GGUF of Q4_0 and Q8_0 matrices.

    python onnx_from_gguf.py FILE.gguf          writes FILE-onnx/ unless it is there

The weights are the GGUF's own numbers: MatMulNBits with blocks of 32 holds them without loss,
though its scales are float32 where the GGUF has float16. The graph is of the kind that ONNX Runtime
GenAI's own model builder makes (packed query-key-value, GroupQueryAttention with its rotation, the
head for the last token alone). Runs in the peer's environment.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BLOCK = 32
INT8_COMPUTE = 4
"""`accuracy_level`: activations as int8, the fastest."""
RECORD = "weights.json"
_BITS = {"Q4_0": 4, "Q8_0": 8}


def folder_of(path: Path) -> Path:
    """Where the model of a GGUF lies."""
    return path.with_name(f"{path.stem}-onnx")


class Builder:
    """Collects nodes and weights. Tensors are called by the names of the GGUF's parts."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        if (arch := self.fields["general.architecture"]) != "llama":
            sys.exit(f"error: {path.name} is {arch}; only llama models are made into ONNX here")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.num_bytes = self.num_weights = 0

    def config(self, key: str) -> Any:
        return self.fields[f"llama.{key}"]

    def has(self, name: str) -> bool:
        return name in self._tensors

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """A node with one output; names with a dot before the kind are of Microsoft's operators."""
        self.nodes.append(
            helper.make_node(
                kind.removeprefix("."), inputs, [output], name=f"/{output}",
                domain="com.microsoft" if kind.startswith(".") else "", **attributes,
            )
        )  # fmt: skip
        return output

    def constant(self, name: str, values: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def vector(self, name: str) -> str:
        return self.constant(name, np.asarray(self._tensors[name].data, np.float32))

    def linear(self, x: str, names: list[str], output: str) -> str:
        """x times the matrices of `names`, one below the other."""
        bits, quants, scales, columns = self._matrix(names)
        b = self.constant(f"{output}.quants", quants)
        s = self.constant(f"{output}.scales", scales.reshape(-1))
        return self.node(
            ".MatMulNBits", [x, b, s], output, K=columns, N=len(quants), bits=bits,
            block_size=BLOCK, accuracy_level=INT8_COMPUTE,
        )  # fmt: skip

    def embedding(self, ids: str, name: str, output: str) -> str:
        bits, quants, scales, _ = self._matrix([name])
        data = self.constant(f"{name}.rows", quants.reshape(len(quants), -1))
        s = self.constant(f"{name}.row_scales", scales)
        return self.node(
            ".GatherBlockQuantized", [data, ids, s], output, bits=bits, block_size=BLOCK,
            gather_axis=0, quantize_axis=1,
        )  # fmt: skip

    def _matrix(self, names: list[str]) -> tuple[int, np.ndarray, np.ndarray, int]:
        """(bits, quants [rows, blocks, bytes], scales [rows, blocks] float32, columns)."""
        tensors = [self._tensors[name] for name in names]
        kinds = {tensor.tensor_type.name for tensor in tensors}
        if len(kinds) > 1 or not kinds <= _BITS.keys():
            sys.exit(f"error: {', '.join(names)} are {', '.join(sorted(kinds))}, not Q4_0 or Q8_0")
        bits, columns = _BITS[kinds.pop()], int(tensors[0].shape[0])
        rows = np.concatenate([np.asarray(tensor.data) for tensor in tensors])
        blocks = rows.reshape(len(rows), columns // BLOCK, -1)
        scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
        stored = blocks[..., 2:]
        if bits == 8:
            quants = stored ^ np.uint8(0x80)  # int8 → uint8 around the zero point 128
        else:
            # Byte j holds the numbers j and j + 16; here it holds 2j and 2j + 1.
            ordered = np.concatenate([stored & 15, stored >> 4], axis=-1)
            quants = ordered[..., 0::2] | ordered[..., 1::2] << 4
        self.num_bytes += quants.nbytes + scales.nbytes
        self.num_weights += len(rows) * columns
        return bits, quants, scales, columns


def build(path: Path) -> tuple[Any, dict[str, Any], float]:
    """(model, genai_config.json, bits per weight)."""
    b = Builder(path)
    hidden, layers = b.config("embedding_length"), b.config("block_count")
    heads = b.config("attention.head_count")
    kv_heads = b.config("attention.head_count_kv")
    head_dim = b.fields.get("llama.attention.key_length", hidden // heads)
    epsilon, context = b.config("attention.layer_norm_rms_epsilon"), b.config("context_length")

    angles = np.outer(
        np.arange(context),
        b.config("rope.freq_base") ** (-np.arange(0, head_dim, 2) / head_dim),
    )
    cos = b.constant("cos_cache", np.cos(angles).astype(np.float32))
    sin = b.constant("sin_cache", np.sin(angles).astype(np.float32))
    one = b.constant("one", np.array([1], np.int64))
    lengths = b.node("ReduceSum", ["attention_mask", one], "lengths", keepdims=0)
    lengths = b.node("Sub", [lengths, one], "last_positions")
    lengths = b.node("Cast", [lengths], "seqlens_k", to=TensorProto.INT32)
    total = b.node("Shape", ["attention_mask"], "mask_shape")
    index = b.constant("index_one", np.array(1, np.int64))
    total = b.node("Gather", [total, index], "total_long", axis=0)
    total = b.node("Cast", [total], "total", to=TensorProto.INT32)

    def normed(stream: str, added: str | None, scale: str, output: str) -> tuple[str, str]:
        """(norm of stream + added, the sum)."""
        weight = b.vector(scale)
        if added is None:
            rms = b.node(
                "SimplifiedLayerNormalization", [stream, weight], output,
                axis=-1, epsilon=epsilon, stash_type=1,
            )  # fmt: skip
            return rms, stream
        b.nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization", [stream, added, weight],
                [output, "", "", f"{output}.sum"], name=f"/{output}", domain="com.microsoft",
                epsilon=epsilon,
            )
        )  # fmt: skip
        return output, f"{output}.sum"

    stream = b.embedding("input_ids", "token_embd.weight", "embedded")
    added: str | None = None
    for i in range(layers):
        at = f"blk.{i}"
        x, stream = normed(stream, added, f"{at}.attn_norm.weight", f"{at}.x")
        qkv = b.linear(x, [f"{at}.attn_{part}.weight" for part in "qkv"], f"{at}.qkv")
        b.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [qkv, "", "", f"past_key_values.{i}.key", f"past_key_values.{i}.value",
                 lengths, total, cos, sin],
                [f"{at}.attended", f"present.{i}.key", f"present.{i}.value"],
                name=f"/{at}.attention", domain="com.microsoft", num_heads=heads,
                kv_num_heads=kv_heads, scale=head_dim**-0.5, do_rotary=1, rotary_interleaved=1,
            )
        )  # fmt: skip
        attended = b.linear(f"{at}.attended", [f"{at}.attn_output.weight"], f"{at}.output")
        x, stream = normed(stream, attended, f"{at}.ffn_norm.weight", f"{at}.y")
        gate = b.linear(x, [f"{at}.ffn_gate.weight"], f"{at}.gate")
        up = b.linear(x, [f"{at}.ffn_up.weight"], f"{at}.up")
        sigmoid = b.node("Sigmoid", [gate], f"{at}.sigmoid")
        silu = b.node("Mul", [gate, sigmoid], f"{at}.silu")
        inner = b.node("Mul", [silu, up], f"{at}.inner")
        added = b.linear(inner, [f"{at}.ffn_down.weight"], f"{at}.down")
    x, _ = normed(stream, added, "output_norm.weight", "normed")
    last = b.constant("last", np.array([-1], np.int64))
    x = b.node("Gather", [x, last], "last_token", axis=1)
    tied = not b.has("output.weight")
    b.linear(x, ["token_embd.weight" if tied else "output.weight"], "logits")
    if tied:  # stored twice, counted once
        b.num_bytes -= b.weights[-1].ByteSize() + b.weights[-2].ByteSize()
        b.num_weights -= _vocab_size(b) * hidden

    cache = ["batch", kv_heads, "past", head_dim]
    grown = ["batch", kv_heads, "total", head_dim]
    value = helper.make_tensor_value_info
    inputs = [
        value("input_ids", TensorProto.INT64, ["batch", "sequence"]),
        value("attention_mask", TensorProto.INT64, ["batch", "total"]),
    ]
    outputs = [value("logits", TensorProto.FLOAT, ["batch", 1, _vocab_size(b)])]
    for i in range(layers):
        for part in ("key", "value"):
            inputs.append(value(f"past_key_values.{i}.{part}", TensorProto.FLOAT, cache))
            outputs.append(value(f"present.{i}.{part}", TensorProto.FLOAT, grown))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(b.nodes, "decoder", inputs, outputs, b.weights)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    config = {
        "model": {
            "type": "llama",
            "bos_token_id": b.fields["tokenizer.ggml.bos_token_id"],
            "eos_token_id": b.fields["tokenizer.ggml.eos_token_id"],
            "pad_token_id": b.fields["tokenizer.ggml.eos_token_id"],
            "context_length": context,
            "vocab_size": _vocab_size(b),
            "decoder": {
                "session_options": {"provider_options": []},
                "filename": "model.onnx",
                "head_size": head_dim,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "num_hidden_layers": layers,
                "num_key_value_heads": kv_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": context, "past_present_share_buffer": True},
    }
    return model, config, 8 * b.num_bytes / b.num_weights


def _vocab_size(b: Builder) -> int:
    return len(b.fields["tokenizer.ggml.tokens"])


def main() -> None:
    path = Path(sys.argv[1])
    folder = folder_of(path)
    record = folder / RECORD
    stamp = path.stat().st_mtime
    if record.is_file() and json.loads(record.read_text())["source_time"] == stamp:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model, config, bits = build(path)
    target = folder / "model.onnx"
    onnx.save(model, target, save_as_external_data=True, location="model.onnx.data")
    (folder / "genai_config.json").write_text(json.dumps(config, indent=1))
    record.write_text(json.dumps({"source_time": stamp, "bits_per_weight": round(bits, 3)}))


if __name__ == "__main__":
    main()
