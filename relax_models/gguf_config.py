"""The part of a GGUF's metadata that all Llama-like decoders share."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..artifact.errors import CheckpointError
from .checkpoint.source import FLOAT_DTYPES, Checkpoint
from .config import DecoderConfig
from .config_fields import Fields
from .rope import gguf_rope

# Settings that change the maths, with the value that leaves it alone (see Fields.refuse).
_REFUSED: Mapping[str, Any] = {
    "expert_count": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.scale": None,
    "attention.clamp_kqv": None,
    "attention.max_alibi_bias": None,
    "attention.causal": True,
    "attention.temperature_scale": None,
    "attention.temperature_length": None,
    "attention.kv_lora_rank": None,
    "attention.shared_kv_layers": None,
    "rope.dimension_sections": None,
    "use_parallel_residual": None,
}


def gguf_fields(checkpoint: Checkpoint) -> Fields:
    """The metadata under the architecture's own prefix."""
    architecture = checkpoint.config.get("general.architecture")
    return Fields(checkpoint.config, source=checkpoint.path.name, prefix=f"{architecture}.")


def gguf_decoder(checkpoint: Checkpoint, model_type: str) -> DecoderConfig:
    """The decoder that plain Llama would be with this metadata: one rope, no windows. Biases and
    a tied head are told by the tensors that are there. Each architecture replaces the rest.

    Raises CheckpointError for a missing or impossible value and for settings known to change the
    maths into something this decoder does not have.
    """
    fields, tensors = gguf_fields(checkpoint), checkpoint.tensors
    fields.refuse(_REFUSED)
    num_layers = fields.integer("block_count")
    num_heads = fields.uniform_integer("attention.head_count")
    if num_heads < 1:
        raise fields.error("attention.head_count", f"must be positive, got {num_heads}")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    value_length = fields.integer("attention.value_length", head_dim)
    if value_length != head_dim:
        raise fields.error(
            "attention.value_length", f"= {value_length} differs from the key length {head_dim}"
        )
    context_length = fields.integer("context_length")
    rope = gguf_rope(
        fields,
        head_dim=head_dim,
        context_length=context_length,
        divisors=_rope_divisors(checkpoint),
    )
    special = Fields(checkpoint.config, source=checkpoint.path.name, prefix="tokenizer.ggml.")
    bos = special.token_ids("bos_token_id")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=_vocab_size(fields, checkpoint),
        hidden_size=hidden_size,
        intermediate_size=fields.uniform_integer("feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=fields.uniform_integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context_length,
        attention_scale=head_dim**-0.5,
        ropes=(rope,),
        layer_ropes=(0,) * num_layers,
        layer_windows=(None,) * num_layers,
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_token_ids(special),
    )


def _eos_token_ids(special: Fields) -> tuple[int, ...]:
    """The end of text and, where a chat turn ends with another token, the end of turn."""
    ids = special.token_ids("eos_token_id") + special.token_ids("eot_token_id")
    return tuple(dict.fromkeys(ids))


def _vocab_size(fields: Fields, checkpoint: Checkpoint) -> int:
    """Rows of the embedding: `vocab_size` is often missing, and may be the unpadded one."""
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{fields.source}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _rope_divisors(checkpoint: Checkpoint) -> tuple[float, ...]:
    """Llama 3.1's frequency scaling, which llama.cpp's converter writes as a tensor."""
    info = checkpoint.tensors.get("rope_freqs.weight")
    if info is None:
        return ()
    if info.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{checkpoint.path.name}: rope_freqs.weight is {info.dtype}; it must be a float tensor"
        )
    return tuple(checkpoint.read(info.name).astype(np.float32).reshape(-1).tolist())
