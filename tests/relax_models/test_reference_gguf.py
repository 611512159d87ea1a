"""GGUFs, written here as llama.cpp's converter does, give the logits of the model they are of."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from everycast.relax_models import registry
from everycast.relax_models.checkpoint.gguf import GGUFCheckpoint
from everycast.relax_models.checkpoint.huggingface import HuggingFaceCheckpoint
from everycast.relax_models.config import DecoderConfig
from everycast.relax_models.rope import RopeConfig, inverse_frequencies

gguf = pytest.importorskip("gguf", reason="GGUF files are written by the gguf package")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 32}),
    "gemma3-linear": ("gemma3_text", {"query_pre_attn_scalar": 32, "rope_parameters": LINEAR}),
}
NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def convert(checkpoint: HuggingFaceCheckpoint, config: DecoderConfig, path: Path) -> GGUFCheckpoint:
    """Write `checkpoint` as convert_hf_to_gguf.py does."""
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.ropes[0]
    writer.add_rope_freq_base(rope.theta)
    if rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "llama3":
        plain = inverse_frequencies(RopeConfig(rope.rotary_dim, rope.theta))
        writer.add_tensor("rope_freqs.weight", plain / inverse_frequencies(rope))
    if architecture == "gemma3":
        writer.add_sliding_window(8)
    for name in checkpoint.tensors:
        values = np.asarray(checkpoint.read(name), np.float32)
        if architecture == "llama" and ".q_proj." in name:
            values = to_pairs(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = to_pairs(values, config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(gguf_name(name, architecture), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFCheckpoint(path)


def to_pairs(values: np.ndarray, num_heads: int) -> np.ndarray:
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def gguf_name(name: str, architecture: str) -> str:
    module, kind = name.rsplit(".", 1)
    last = module.rsplit(".", 1)[-1]
    if last == "post_attention_layernorm":
        short = "post_attention_norm" if architecture == "gemma3" else "ffn_norm"
    else:
        short = NAMES[module] if module in NAMES else NAMES[last]
    parts = module.split(".")
    block = f"blk.{parts[2]}." if parts[1:2] == ["layers"] else ""
    return f"{block}{short}.{kind}"


@pytest.mark.parametrize("case", CASES)
def test_gguf_logits_equal_the_original(
    case: str, tmp_path: Path, make_tiny: Callable[..., Path], reference: ModuleType
) -> None:
    model_type, overrides = CASES[case]
    original = HuggingFaceCheckpoint(make_tiny(model_type, tmp_path, **overrides))
    config = registry.load_config(original)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 37)
    expected = logits_of(reference, original, ids)

    logits = logits_of(reference, convert(original, config, tmp_path / "model.gguf"), ids)

    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


def logits_of(reference: ModuleType, checkpoint: Any, ids: np.ndarray) -> np.ndarray:
    config = registry.load_config(checkpoint)
    weights: Mapping[str, np.ndarray] = reference.float_weights(
        registry.weight_map(config, checkpoint), checkpoint
    )
    logits: np.ndarray = reference.reference_logits(config, weights, ids)
    return logits


TEXT = (
    "The harbour was quiet that morning. Two fishermen sat on the wall and mended their nets, "
    "and neither of them spoke. When the bell of the church rang nine, the younger one stood up, "
    "looked at the sky in the west, and said that there would be rain before the evening. The "
    "other only nodded, because he had known it since he woke: his left knee was never wrong "
    "about the weather."
)


@pytest.mark.slow
def test_perplexity_of_the_default_model(default_gguf: Path, reference: ModuleType) -> None:
    """A wrong order of Q and K gives three times as much, and text that still looks sane."""
    from everycast.relax_models.checkpoint.tokenizer_gguf import tokenizer_from_gguf

    checkpoint = GGUFCheckpoint(default_gguf)
    tokenizer = tokenizer_from_gguf(checkpoint.config, where=default_gguf.name).tokenizer
    ids = np.array(tokenizer.encode(TEXT, add_special_tokens=False).ids)
    perplexity = reference.perplexity(logits_of(reference, checkpoint, ids), ids)
    assert perplexity == pytest.approx(43.286, rel=1e-3)
