"""Which tensors a model takes from a checkpoint, and what is said when they do not fit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from everycast.artifact.errors import CheckpointError
from everycast.relax_models import name_map, registry
from everycast.relax_models.checkpoint.source import TensorInfo
from everycast.relax_models.config import DecoderConfig
from everycast.relax_models.weights import WeightSource
from hypothesis import given
from hypothesis import strategies as st

HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GGUF_CONFIG: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 24,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": [2, 2],
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@dataclass
class FakeCheckpoint:
    kind: Literal["huggingface", "gguf"]
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    path: Path = Path("model")
    values: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...], dtype: str = "F32") -> None:
        info = TensorInfo(name, shape, dtype, 4 * int(np.prod(shape)))
        self.tensors = {**self.tensors, name: info}

    def remove(self, name: str) -> None:
        self.tensors = {k: v for k, v in self.tensors.items() if k != name}

    def read(self, name: str) -> np.ndarray:
        return self.values[name]

    def source_hash(self) -> str:
        return ""


def hf_checkpoint(*, prefix: str = "model.", **settings: Any) -> FakeCheckpoint:
    checkpoint = FakeCheckpoint("huggingface", {**HF_CONFIG, **settings})
    for name, shape in name_map.parameter_shapes(registry.load_config(checkpoint)).items():
        is_head = name == "lm_head.weight"
        checkpoint.add(name if is_head else prefix + name.removeprefix("model."), shape)
    return checkpoint


def gguf_checkpoint(**metadata: Any) -> FakeCheckpoint:
    checkpoint = FakeCheckpoint("gguf", {**GGUF_CONFIG, **metadata})
    checkpoint.add("token_embd.weight", (32, 16), "Q8_0")
    checkpoint.add("output_norm.weight", (16,))
    for i in range(2):
        for name, shape in {
            "attn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16),
            "attn_output": (16, 16), "ffn_norm": (16,), "ffn_gate": (24, 16),
            "ffn_up": (24, 16), "ffn_down": (16, 24),
        }.items():  # fmt: skip
            checkpoint.add(f"blk.{i}.{name}.weight", shape)
    return checkpoint


def load(checkpoint: FakeCheckpoint) -> tuple[DecoderConfig, dict[str, WeightSource]]:
    config = registry.load_config(checkpoint)
    return config, registry.weight_map(config, checkpoint)


def error_of(checkpoint: FakeCheckpoint) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
def test_parameters_are_found_under_every_prefix(prefix: str) -> None:
    _, sources = load(hf_checkpoint(prefix=prefix))
    assert sources["model.embed_tokens.weight"].name == f"{prefix}embed_tokens.weight"
    assert (
        sources["model.layers.1.mlp.up_proj.weight"].name == f"{prefix}layers.1.mlp.up_proj.weight"
    )


def test_tied_head_works_with_and_without_a_copy_in_the_file() -> None:
    checkpoint = hf_checkpoint(tie_word_embeddings=True)
    assert "lm_head.weight" not in load(checkpoint)[1]
    checkpoint.add("lm_head.weight", (32, 16))
    assert "lm_head.weight" not in load(checkpoint)[1]


def test_untied_head_must_be_there() -> None:
    checkpoint = hf_checkpoint(tie_word_embeddings=False)
    assert load(checkpoint)[1]["lm_head.weight"] == WeightSource("lm_head.weight")
    checkpoint.remove("lm_head.weight")
    assert "missing lm_head.weight; the config does not tie the head" in error_of(checkpoint)


def test_fused_projections_are_cut_into_rows() -> None:
    checkpoint = hf_checkpoint(attention_bias=True)
    for i in range(2):
        for name in ("q_proj", "k_proj", "v_proj"):
            checkpoint.remove(f"model.layers.{i}.self_attn.{name}.weight")
            checkpoint.remove(f"model.layers.{i}.self_attn.{name}.bias")
        for name in ("gate_proj", "up_proj"):
            checkpoint.remove(f"model.layers.{i}.mlp.{name}.weight")
        checkpoint.add(f"model.layers.{i}.self_attn.qkv_proj.weight", (32, 16))
        checkpoint.add(f"model.layers.{i}.self_attn.qkv_proj.bias", (32,))
        checkpoint.add(f"model.layers.{i}.mlp.gate_up_proj.weight", (48, 16))
    _, sources = load(checkpoint)
    qkv = "model.layers.1.self_attn.qkv_proj"
    attention = "model.layers.1.self_attn."
    assert sources[f"{attention}q_proj.weight"] == WeightSource(f"{qkv}.weight", slice(0, 16))
    assert sources[f"{attention}k_proj.weight"] == WeightSource(f"{qkv}.weight", slice(16, 24))
    assert sources[f"{attention}v_proj.bias"] == WeightSource(f"{qkv}.bias", slice(24, 32))
    assert sources["model.layers.0.mlp.up_proj.weight"].rows == slice(24, 48)

    checkpoint.add(f"{qkv}.weight", (40, 16))
    assert f"{qkv}.weight [40, 16] instead of [32, 16]" in error_of(checkpoint)


def test_everything_that_does_not_fit_is_listed_in_one_line() -> None:
    checkpoint = hf_checkpoint()
    checkpoint.remove("model.norm.weight")
    checkpoint.remove("model.layers.1.mlp.up_proj.weight")
    checkpoint.add("model.layers.0.self_attn.q_proj.bias", (16,))
    checkpoint.add("model.embed_tokens.weight", (33, 16))
    message = error_of(checkpoint)
    assert "missing model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "unexpected model.layers.0.self_attn.q_proj.bias" in message
    assert "wrong shape: model.embed_tokens.weight [33, 16] instead of [32, 16]" in message


def test_a_long_list_is_cut_and_counted() -> None:
    checkpoint = hf_checkpoint()
    checkpoint.tensors = {k: v for k, v in checkpoint.tensors.items() if ".layers." not in k}
    assert "and 10 more" in error_of(checkpoint)


def test_tensors_that_say_nothing_new_are_ignored() -> None:
    checkpoint = hf_checkpoint()
    checkpoint.add("model.layers.0.self_attn.rotary_emb.inv_freq", (2,))
    load(checkpoint)
    checkpoint.add("vision_tower.embeddings.weight", (4, 4))
    assert "unexpected vision_tower.embeddings.weight" in error_of(checkpoint)
    multimodal = hf_checkpoint(prefix="language_model.model.")
    multimodal.add("vision_tower.embeddings.weight", (4, 4))
    load(multimodal)


def test_unknown_architecture_names_the_nearest() -> None:
    message = error_of(FakeCheckpoint("huggingface", {"model_type": "qwen3_moe"}))
    assert "'qwen3_moe' is not supported; the nearest supported is 'qwen3'" in message
    message = error_of(FakeCheckpoint("gguf", {"general.architecture": "gemma4"}))
    assert "nearest supported is 'gemma3'" in message
    assert "model_type is missing" in error_of(FakeCheckpoint("huggingface", {}))


def test_gguf_head_is_tied_when_there_is_none() -> None:
    checkpoint = gguf_checkpoint()
    config, sources = load(checkpoint)
    assert config.tie_word_embeddings and "lm_head.weight" not in sources
    assert config.vocab_size == 32
    checkpoint.add("output.weight", (32, 16))
    config, sources = load(checkpoint)
    assert not config.tie_word_embeddings
    assert sources["lm_head.weight"] == WeightSource("output.weight")


def test_gguf_llama_turns_q_and_k_back_and_nothing_else() -> None:
    checkpoint = gguf_checkpoint()
    for i in range(2):
        for name, size in (("attn_q", 16), ("attn_k", 8), ("attn_v", 8)):
            checkpoint.add(f"blk.{i}.{name}.bias", (size,))
    config, sources = load(checkpoint)
    assert config.attention_bias and not config.attention_output_bias
    turned = {name for name, source in sources.items() if source.rows is not None}
    assert turned == {
        f"model.layers.{i}.self_attn.{p}_proj.{kind}"
        for i in range(2)
        for p in "qk"
        for kind in ("weight", "bias")
    }


def test_gguf_llama_window_is_for_all_layers() -> None:
    config, _ = load(gguf_checkpoint(**{"llama.attention.sliding_window": 7}))
    assert config.layer_windows == (7, 7)


@given(num_heads=st.integers(1, 6), half=st.integers(1, 16))
def test_halves_from_pairs_undoes_the_converter(num_heads: int, half: int) -> None:
    rows = np.arange(num_heads * half * 2)
    # llama.cpp convert_hf_to_gguf.py, LlamaModel.permute
    converted = rows.reshape(num_heads, 2, half).swapaxes(1, 2).reshape(-1)
    back = name_map.halves_from_pairs(num_heads, 2 * half)
    np.testing.assert_array_equal(converted[back], rows)


def test_gguf_rope_factors_are_used() -> None:
    checkpoint = gguf_checkpoint()
    checkpoint.add("rope_freqs.weight", (2,))
    checkpoint.values["rope_freqs.weight"] = np.array([1.0, 8.0], np.float32)
    config, _ = load(checkpoint)
    assert config.ropes[0].divisors == (1.0, 8.0)
    checkpoint.add("rope_freqs.weight", (2,), "Q8_0")
    assert "rope_freqs.weight is Q8_0" in error_of(checkpoint)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon is missing"),
    ],
)
def test_gguf_settings_that_cannot_be_honoured(metadata: dict[str, Any], named: str) -> None:
    assert named in error_of(gguf_checkpoint(**metadata))
    assert "model: " in error_of(gguf_checkpoint(**metadata))


def test_gguf_without_an_embedding() -> None:
    checkpoint = gguf_checkpoint()
    checkpoint.remove("token_embd.weight")
    assert "token_embd.weight is missing" in error_of(checkpoint)
