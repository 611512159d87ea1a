"""The NumPy reference, the configs and the name maps against transformers, on tiny models."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from everycast.relax_models import registry
from everycast.relax_models.checkpoint.huggingface import HuggingFaceCheckpoint

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16}},
    ),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral-window": ("mistral", {}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-untied-biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-linear": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str, tmp_path: Path, make_tiny: Callable[..., Path], reference: ModuleType
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model_type, overrides = CASES[case]
    checkpoint = HuggingFaceCheckpoint(make_tiny(model_type, tmp_path, **overrides))
    config = registry.load_config(checkpoint)
    weights = reference.float_weights(registry.weight_map(config, checkpoint), checkpoint)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 37)

    logits = reference.reference_logits(config, weights, ids)

    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    # A flat distribution would hide errors.
    assert expected.std() > 0.5


def test_multimodal_gemma3_is_read_as_its_text_model(
    tmp_path: Path, make_tiny: Callable[..., Path], tiny_models: ModuleType, reference: ModuleType
) -> None:
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_models.random_model("gemma3_text")
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text.config.to_dict(), vision_config=vision)
    whole = Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.tie_weights()
    whole.save_pretrained(tmp_path)
    ids = np.arange(3, 40)

    checkpoint = HuggingFaceCheckpoint(tmp_path)
    decoder = registry.load_config(checkpoint)
    weights = reference.float_weights(registry.weight_map(decoder, checkpoint), checkpoint)

    with torch.no_grad():
        expected = text(torch.from_numpy(ids)[None]).logits[0].numpy()
    logits = reference.reference_logits(decoder, weights, ids)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_tiny_tokenizer_renders_chatml(tmp_path: Path, make_tiny: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny("llama", tmp_path))
    assert len(tokenizer) == 300
    text = "the quick brown fox, ünïcode 🦊"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
