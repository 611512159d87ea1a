"""`mlc-chat-config.json`: what MLC's clients, and our engine, read about a model."""

from dataclasses import asdict
from typing import Any

from ..relax_models.checkpoint.tokenizer import TokenizerInfo
from ..relax_models.config import DecoderConfig

CHAT_CONFIG_JSON = "mlc-chat-config.json"


def chat_config(
    config: DecoderConfig,
    tokenizer: TokenizerInfo,
    quantization: str,
    context_window_size: int,
) -> dict[str, Any]:
    """The file's contents, in MLC-LLM's field names (version 0.1.0)."""
    eos = tokenizer.eos_token_ids or config.eos_token_ids
    return {
        "version": "0.1.0",
        "model_type": config.model_type,
        "quantization": quantization,
        "model_config": asdict(config),
        "vocab_size": config.vocab_size,
        "context_window_size": context_window_size,
        "sliding_window_size": -1,
        "attention_sink_size": -1,
        "tensor_parallel_shards": 1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(eos),
        "pad_token_id": tokenizer.pad_token_id,
        "tokenizer_files": list(tokenizer.files),
    }
