"""Llama 2 and 3, SmolLM2 and others of model type `llama`: the decoder with nothing added."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .checkpoint.source import Checkpoint
from .config import DecoderConfig
from .gguf_config import gguf_decoder, gguf_fields
from .hf_config import hf_decoder, hf_fields
from .name_map import LLAMA_GGUF_NAMES, gguf_weight_map, hf_weight_map
from .weights import WeightSource


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    fields = hf_fields(config)
    bias = fields.flag("attention_bias")
    return replace(
        hf_decoder(config, "llama"),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    decoder = gguf_decoder(checkpoint, "llama")
    # Zero or absent, but for the first Mistral.
    window = gguf_fields(checkpoint).integer("attention.sliding_window", 0) or None
    return replace(decoder, layer_windows=(window,) * decoder.num_hidden_layers)


def weight_map(config: DecoderConfig, checkpoint: Checkpoint) -> dict[str, WeightSource]:
    if checkpoint.kind == "gguf":
        # llama.cpp's converter reorders the rows of Q and K, so that its rotary embedding can
        # turn neighbours instead of halves.
        return gguf_weight_map(config, LLAMA_GGUF_NAMES, interleaved_qk=True)
    return hf_weight_map(config, checkpoint.tensors)
