"""Gemma 3 (the text model): norms before and after attention and MLP, an RMSNorm over each head of
Q and K, scaled embeddings, and five layers with a sliding window for each one without.

Layers with a window rotate with their own base and are never stretched for long contexts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .checkpoint.source import Checkpoint
from .config import DecoderConfig
from .config_fields import Fields
from .gguf_config import gguf_decoder, gguf_fields
from .hf_config import (
    FULL,
    SLIDING,
    hf_decoder,
    hf_fields,
    hf_head_dim,
    hf_layer_types,
    hf_layer_windows,
)
from .name_map import GEMMA_GGUF_NAMES, gguf_weight_map, hf_weight_map
from .rope import RopeConfig, hf_rope, hf_rope_settings
from .weights import WeightSource

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_WINDOW_PATTERN = 6  # every sixth layer sees everything

# The text part of a multimodal config.json names only what differs from these.
_HF_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    config = _text_config(config)
    fields = hf_fields(config)
    num_layers = fields.integer("num_hidden_layers")
    pattern = fields.integer(
        "sliding_window_pattern", fields.integer("_sliding_window_pattern", _WINDOW_PATTERN)
    )
    layer_types = hf_layer_types(fields, _layer_types(fields, num_layers, pattern))
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    scalar = fields.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise fields.error("query_pre_attn_scalar", f"must be positive, got {scalar}")
    bias = fields.flag("attention_bias")
    decoder = hf_decoder(
        config, "gemma3", ropes=_hf_ropes(fields), activation_key="hidden_activation"
    )
    return replace(
        _gemma(decoder, layer_types),
        attention_scale=scalar**-0.5,
        layer_windows=hf_layer_windows(fields, layer_types, window),
        attention_bias=bias,
        attention_output_bias=bias,
    )


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    fields = gguf_fields(checkpoint)
    decoder = gguf_decoder(checkpoint, "gemma3")
    layer_types = _layer_types(
        fields,
        decoder.num_hidden_layers,
        fields.integer("attention.sliding_window_pattern", _WINDOW_PATTERN),
    )
    window = fields.integer("attention.sliding_window")
    # The metadata holds the global rope alone.
    local = RopeConfig(decoder.head_dim, fields.number("rope.freq_base_swa", _LOCAL_THETA))
    scale = decoder.attention_scale
    if decoder.num_hidden_layers == 62:
        # The 27B model alone scales by hidden_size / heads, which the metadata does not say.
        scale = (decoder.hidden_size / decoder.num_attention_heads) ** -0.5
    return replace(
        _gemma(replace(decoder, ropes=(*decoder.ropes, local)), layer_types),
        attention_scale=scale,
        activation="gelu_tanh",
        layer_windows=tuple(window if kind == SLIDING else None for kind in layer_types),
    )


def weight_map(config: DecoderConfig, checkpoint: Checkpoint) -> dict[str, WeightSource]:
    if checkpoint.kind == "gguf":
        # llama.cpp's converter has added the 1 to the norm weights.
        return gguf_weight_map(config, GEMMA_GGUF_NAMES)
    return hf_weight_map(config, checkpoint.tensors, norm_offset=1.0)


def _gemma(decoder: DecoderConfig, layer_types: tuple[str, ...]) -> DecoderConfig:
    """`decoder`, whose ropes are the global and the local one, with what every Gemma 3 has."""
    return replace(
        decoder,
        # transformers rounds this to the dtype it runs in; here sums are float32.
        embedding_scale=decoder.hidden_size**0.5,
        qk_norm=True,
        post_norms=True,
        layer_ropes=tuple(int(kind == SLIDING) for kind in layer_types),
    )


def _layer_types(fields: Fields, num_layers: int, pattern: int) -> tuple[str, ...]:
    if pattern < 1:
        raise fields.error("sliding_window_pattern", f"must be positive, got {pattern}")
    return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's settings, out of a multimodal config.json where it is one."""
    text = hf_fields(config).mapping("text_config")
    if text is None:
        return {**_HF_DEFAULTS, **config}
    outer = {
        key: config[key]
        for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id")
        if config.get(key) is not None
    }
    return {**_HF_DEFAULTS, **text, **outer}


def _hf_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """The global and the local rope: settings per layer type (transformers 5), or `rope_scaling`
    for the global one and a base for each (transformers 4)."""
    settings = dict(hf_rope_settings(fields))
    nested = Fields(settings, source=f"{fields.source}: rope settings")
    per_type = {kind: nested.mapping(kind) or {} for kind in (FULL, SLIDING)}
    settings = {key: value for key, value in settings.items() if key not in per_type}
    if "rope_parameters" in fields and settings and "rope_scaling" not in fields:
        raise fields.error("rope_parameters", f"must have the keys {FULL} and {SLIDING}")
    head_dim = hf_head_dim(fields)
    return (
        hf_rope(
            fields,
            {**settings, **per_type[FULL]},
            head_dim=head_dim,
            default_theta=_GLOBAL_THETA,
        ),
        hf_rope(
            fields,
            per_type[SLIDING],
            head_dim=head_dim,
            default_theta=_LOCAL_THETA,
            theta_key="rope_local_base_freq",
        ),
    )
