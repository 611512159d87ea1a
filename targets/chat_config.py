"""`mlc-chat-config.json`: what MLC's clients, and our engine, read about a model."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from ..relax_models.checkpoint.huggingface import read_json_object
from ..relax_models.checkpoint.source import Checkpoint
from ..relax_models.checkpoint.tokenizer import TokenizerInfo
from ..relax_models.config import DecoderConfig

logger = logging.getLogger(__name__)

CHAT_CONFIG_JSON = "mlc-chat-config.json"
_ADVICE: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 <= value <= 1,
    "top_k": lambda value: -1 <= value < 2**31 and value == int(value),
    "repetition_penalty": lambda value: 0 < value < math.inf,
}
"""Sampling settings of `generation_config.json` → the values that the engine takes."""


def chat_config(
    config: DecoderConfig,
    tokenizer: TokenizerInfo,
    quantization: str,
    context_window_size: int,
    sampling: Mapping[str, float] = MappingProxyType({}),
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
        **sampling,
    }


def sampling_advice(checkpoint: Checkpoint) -> dict[str, float]:
    """What the makers of a Hugging Face checkpoint advise for sampling, by `_ADVICE`'s names.

    From `generation_config.json`, as transformers reads it: with `do_sample` false only the
    repetition penalty counts. A GGUF gives none. Values out of range are left out, with a warning.
    Raises CheckpointError for a file that is not a JSON object.
    """
    path = checkpoint.path / "generation_config.json"
    if checkpoint.kind != "huggingface" or not path.exists():
        return {}
    given = read_json_object(path)
    advice: dict[str, float] = {}
    for name, is_allowed in _ADVICE.items():
        value = given.get(name)
        if value is None or (given.get("do_sample") is False and name != "repetition_penalty"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_allowed(value):
            logger.warning("%s: %s %r is left out: it cannot be sampled with", path, name, value)
            continue
        advice[name] = int(value) if name == "top_k" else value
    return advice
