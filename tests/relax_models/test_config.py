"""From the settings of a checkpoint to a decoder's configuration."""

from dataclasses import replace
from typing import Any

import pytest
from everycast.artifact.errors import CheckpointError
from everycast.relax_models import gemma3, llama, mistral, qwen2, qwen3
from everycast.relax_models.rope import RopeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def test_llama_sizes_and_defaults() -> None:
    config = llama.from_hf({**SIZES, "bos_token_id": 1, "eos_token_id": [2, 3]})
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (16, 2, 1e-5)
    assert config.attention_scale == 0.25
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 3))
    assert not (config.attention_bias or config.mlp_bias or config.tie_word_embeddings)
    assert config.layer_windows == (None,) * 4 and config.layer_ropes == (0,) * 4
    without = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    assert llama.from_hf(without).num_key_value_heads == 4
    assert llama.from_hf({**SIZES, "head_dim": 32}).head_dim == 32
    biased = llama.from_hf({**SIZES, "attention_bias": True, "mlp_bias": True})
    assert biased.attention_bias and biased.attention_output_bias and biased.mlp_bias


def test_mistral_window_defaults_like_transformers() -> None:
    assert mistral.from_hf(SIZES).layer_windows == (4096,) * 4
    assert mistral.from_hf({**SIZES, "sliding_window": None}).layer_windows == (None,) * 4
    assert mistral.from_hf({**SIZES, "sliding_window": 7}).layer_windows == (7,) * 4
    with pytest.raises(CheckpointError, match="layer_types contradicts"):
        mistral.from_hf({**SIZES, "layer_types": ["full_attention"] * 4})


def test_qwen_windows() -> None:
    assert qwen2.from_hf({**SIZES, "sliding_window": 9}).layer_windows == (None,) * 4
    on = {**SIZES, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert qwen2.from_hf(on).layer_windows == (None, None, None, 9)
    types = ["sliding_attention", "full_attention"] * 2
    assert qwen3.from_hf({**on, "layer_types": types}).layer_windows == (9, None, 9, None)
    with pytest.raises(CheckpointError, match="sliding_window is missing"):
        qwen2.from_hf({**SIZES, "layer_types": types})


def test_qwen_biases_and_head_dim() -> None:
    config = qwen2.from_hf(SIZES)
    assert config.attention_bias and not config.attention_output_bias
    config = qwen3.from_hf({**SIZES, "head_dim": 16})
    assert config.qk_norm and not config.attention_bias
    assert qwen3.from_hf(SIZES).head_dim == 128


def test_gemma3_supplies_what_its_config_leaves_out() -> None:
    config = gemma3.from_hf({**SIZES, "num_hidden_layers": 7, "sliding_window": 8})
    assert config.layer_windows == (8, 8, 8, 8, 8, None, 8)
    assert config.layer_ropes == (1, 1, 1, 1, 1, 0, 1)
    assert config.ropes == (RopeConfig(256, 1e6), RopeConfig(256, 1e4))
    assert config.embedding_scale == 8.0 and config.attention_scale == 256**-0.5
    assert config.tie_word_embeddings and config.qk_norm and config.post_norms
    assert config.activation == "gelu_tanh"


def test_gemma3_of_transformers_4_and_5_say_the_same() -> None:
    old = {
        **SIZES,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    new = {
        **SIZES,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    assert gemma3.from_hf(old) == gemma3.from_hf(new)
    assert gemma3.from_hf(old).ropes[0].kind == "linear"
    assert gemma3.from_hf(old).ropes[1].kind == "default"
    with pytest.raises(CheckpointError, match="must have the keys full_attention"):
        gemma3.from_hf({**SIZES, "rope_parameters": {"rope_type": "default"}})
    with pytest.raises(CheckpointError, match="full_attention must be an object"):
        gemma3.from_hf({**SIZES, "rope_parameters": {"full_attention": "default"}})


def test_gemma3_multimodal_config() -> None:
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    config = gemma3.from_hf({"text_config": text, "eos_token_id": [1, 106]})
    assert (config.vocab_size, config.num_attention_heads, config.head_dim) == (262_208, 8, 256)
    assert config.eos_token_ids == (1, 106) and config.bos_token_id == 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a number, got '64'"),
        ({"vocab_size": 1.5}, "vocab_size must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads must be positive"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite"),
        ({"head_dim": 15}, "head dimension must be even"),
        ({"hidden_act": "relu"}, "'relu' is not supported; supported: silu"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"is_causal": False}, "is_causal"),
    ],
)
def test_settings_that_cannot_be_honoured(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        llama.from_hf({**SIZES, **settings})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_harmless_values_of_refused_settings_pass() -> None:
    neutral: dict[str, Any] = {
        "attn_logit_softcapping": None,
        "mlp_only_layers": [],
        "residual_multiplier": 1.0,
        "is_causal": True,
        "partial_rotary_factor": 1.0,
        "pretraining_tp": 1,
    }
    assert llama.from_hf({**SIZES, **neutral}) == llama.from_hf(SIZES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_windows": (None,)}, "layer_windows has 1 entries for 4 layers"),
        ({"layer_windows": (0,) * 4}, "sliding window must be positive"),
        ({"layer_ropes": (0, 0, 1, 0)}, "must index 1 ropes"),
        ({"activation": "relu"}, "activation 'relu' is unknown"),
        ({"head_dim": 32}, "rope rotates 16 of 32"),
    ],
)
def test_a_config_checks_itself(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        replace(llama.from_hf(SIZES), **change)
