"""The part of a Hugging Face `config.json` that all Llama-like decoders share."""

from collections.abc import Mapping
from typing import Any

from .config import Activation, DecoderConfig
from .config_fields import Fields
from .rope import RopeConfig, hf_rope, hf_rope_settings

# Settings of transformers' models (and of their relatives) that change the maths, with the value
# that leaves it alone; None stands for absent, false, zero or empty.
_REFUSED: Mapping[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attn_temperature_tuning": None,
    "use_bidirectional_attention": None,
    "is_causal": True,
    "mlp_only_layers": None,
    "num_experts": None,
    "num_local_experts": None,
    "n_routed_experts": None,
    "attention_chunk_size": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,
    "layers_block_type": None,
    "num_kv_shared_layers": None,
    "hidden_size_per_layer_input": None,
    "kv_lora_rank": None,
    "clip_qkv": None,
    "alibi": None,
    "use_mrope": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "scale_emb": 1.0,
    "scale_depth": None,
}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

FULL, SLIDING = "full_attention", "sliding_attention"


def hf_fields(config: Mapping[str, Any]) -> Fields:
    return Fields(config, source="config.json")


def hf_decoder(
    config: Mapping[str, Any],
    model_type: str,
    *,
    ropes: tuple[RopeConfig, ...] = (),
    activation_key: str = "hidden_act",
) -> DecoderConfig:
    """The decoder that plain Llama would be with this `config.json`: one rope (the first of
    `ropes`, else the one in the file), no windows, no biases. Each architecture replaces the rest.

    Raises CheckpointError for a missing or impossible value and for settings known to change the
    maths into something this decoder does not have.
    """
    fields = hf_fields(config)
    fields.refuse(_REFUSED)
    head_dim = hf_head_dim(fields)
    num_layers = fields.integer("num_hidden_layers")
    bos = fields.token_ids("bos_token_id")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=fields.integer("num_attention_heads"),
        num_key_value_heads=fields.integer(
            "num_key_value_heads", fields.integer("num_attention_heads")
        ),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        attention_scale=head_dim**-0.5,
        ropes=ropes or (hf_rope(fields, hf_rope_settings(fields), head_dim=head_dim),),
        layer_ropes=(0,) * num_layers,
        layer_windows=(None,) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        activation=_activation(fields, activation_key),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def hf_head_dim(fields: Fields) -> int:
    """`head_dim`, or hidden_size / num_attention_heads where it is left out. Always positive."""
    num_heads = fields.integer("num_attention_heads")
    if num_heads < 1:
        raise fields.error("num_attention_heads", f"must be positive, got {num_heads}")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // num_heads)
    if head_dim < 1:
        raise fields.error("head_dim", f"must be positive, got {head_dim}")
    return head_dim


def hf_layer_types(fields: Fields, default: tuple[str, ...]) -> tuple[str, ...]:
    """`FULL` or `SLIDING` for each layer, from `layer_types` or else `default`."""
    if "layer_types" not in fields:
        return default
    types = fields.texts("layer_types")
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise fields.error("layer_types", f"has {', '.join(unknown)}; supported: {FULL}, {SLIDING}")
    if len(types) != len(default):
        raise fields.error("layer_types", f"has {len(types)} entries for {len(default)} layers")
    return types


def hf_layer_windows(
    fields: Fields, layer_types: tuple[str, ...], window: int | None
) -> tuple[int | None, ...]:
    """The window of each layer. Raises CheckpointError when a sliding layer has none."""
    if window is None and SLIDING in layer_types:
        raise fields.error("sliding_window", f"is missing, but layer_types has {SLIDING} layers")
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def qwen_layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The windows of Qwen2 and Qwen3: off unless `use_sliding_window`, and then only in the layers
    from `max_window_layers` on."""
    fields = hf_fields(config)
    num_layers = fields.integer("num_hidden_layers")
    window = None
    if fields.flag("use_sliding_window") and not (
        "sliding_window" in config and config["sliding_window"] is None
    ):
        window = fields.integer("sliding_window", 4096)
    num_full = num_layers if window is None else fields.integer("max_window_layers", 28)
    default = tuple(SLIDING if i >= num_full else FULL for i in range(num_layers))
    return hf_layer_windows(fields, hf_layer_types(fields, default), window)


def _activation(fields: Fields, key: str) -> Activation:
    name = fields.text(key, "silu")
    if name not in _ACTIVATIONS:
        raise fields.error(
            key, f"= {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]
