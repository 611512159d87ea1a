"""Qwen2 and Qwen2.5: Llama with biases on Q, K and V and an optional window in late layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .checkpoint.source import Checkpoint
from .config import DecoderConfig
from .gguf_config import gguf_decoder, gguf_fields
from .hf_config import hf_decoder, qwen_layer_windows
from .name_map import LLAMA_GGUF_NAMES, gguf_weight_map, hf_weight_map
from .weights import WeightSource


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    return replace(
        hf_decoder(config, "qwen2"),
        attention_bias=True,
        layer_windows=qwen_layer_windows(config),
    )


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    gguf_fields(checkpoint).refuse({"attention.sliding_window": None})
    return replace(gguf_decoder(checkpoint, "qwen2"), attention_bias=True)


def weight_map(config: DecoderConfig, checkpoint: Checkpoint) -> dict[str, WeightSource]:
    if checkpoint.kind == "gguf":
        return gguf_weight_map(config, LLAMA_GGUF_NAMES)
    return hf_weight_map(config, checkpoint.tensors)
