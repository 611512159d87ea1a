"""Qwen3 (dense): Llama with an RMSNorm over each head of Q and K."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .checkpoint.source import Checkpoint
from .config import DecoderConfig
from .gguf_config import gguf_decoder, gguf_fields
from .hf_config import hf_decoder, hf_fields, qwen_layer_windows
from .name_map import LLAMA_GGUF_NAMES, gguf_weight_map, hf_weight_map
from .weights import WeightSource


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    bias = hf_fields(config).flag("attention_bias")
    return replace(
        hf_decoder({"head_dim": 128, **config}, "qwen3"),
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
        layer_windows=qwen_layer_windows(config),
    )


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    gguf_fields(checkpoint).refuse({"attention.sliding_window": None})
    return replace(gguf_decoder(checkpoint, "qwen3"), qk_norm=True)


def weight_map(config: DecoderConfig, checkpoint: Checkpoint) -> dict[str, WeightSource]:
    if checkpoint.kind == "gguf":
        return gguf_weight_map(config, LLAMA_GGUF_NAMES)
    return hf_weight_map(config, checkpoint.tensors)
