"""Tiny random checkpoints with every feature switched on, written by transformers.

All parameters are random, norms and biases too, so that a wrong one shows in the logits.
"""

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE, TOKENIZER_SIZE = 320, 300
"""Rows of the embedding and ids of the tokenizer: models pad their vocabulary."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8, "head_dim": 32},
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_hidden_layers": 7,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
    },
}
MODEL_TYPES = tuple(_OF_TYPE)


def make_tiny(
    model_type: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """A Hugging Face folder with a random model of `model_type` and a byte-level BPE tokenizer
    with a ChatML template. `overrides` are settings of its config class."""
    model = random_model(model_type, seed=seed, **overrides)
    model.to(_torch_dtype(dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def random_model(model_type: str, *, seed: int = 0, **overrides: Any) -> Any:
    """The model that `make_tiny` saves: transformers, float32, eager attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM

    settings = {**_COMMON, **_OF_TYPE[model_type], **overrides}
    config = AutoConfig.for_model(model_type, **settings)
    model = model_class.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
            elif name.endswith("norm.weight") and not model_type.startswith("gemma"):
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model


def write_tokenizer(folder: Path) -> None:
    """`tokenizer.json` (byte-level BPE, TOKENIZER_SIZE ids) and `tokenizer_config.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog while the other dogs and foxes are sleeping"
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), "utf-8")


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
