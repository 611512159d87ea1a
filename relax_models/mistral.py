"""Mistral: Llama with a sliding window in every layer (v0.1) or none (v0.2 and later).

In GGUF files it calls itself `llama`, and is read by that module.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .checkpoint.source import Checkpoint
from .config import DecoderConfig
from .hf_config import FULL, SLIDING, hf_decoder, hf_fields, hf_layer_types, hf_layer_windows
from .name_map import hf_weight_map
from .weights import WeightSource


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    fields = hf_fields(config)
    # Left out means 4096, null means none: so does transformers' MistralConfig.
    has_window = config.get("sliding_window", 4096) is not None
    window = fields.integer("sliding_window", 4096) if has_window else None
    decoder = hf_decoder(config, "mistral")
    uniform = (FULL if window is None else SLIDING,) * decoder.num_hidden_layers
    if hf_layer_types(fields, uniform) != uniform:
        raise fields.error("layer_types", "contradicts sliding_window, which is for all layers")
    return replace(decoder, layer_windows=hf_layer_windows(fields, uniform, window))


def weight_map(config: DecoderConfig, checkpoint: Checkpoint) -> dict[str, WeightSource]:
    return hf_weight_map(config, checkpoint.tensors)
