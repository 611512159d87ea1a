"""Which checkpoint tensor each parameter of the decoder comes from, and the check that all fit.

Parameters carry the names that Hugging Face gives the tensors of Llama.
"""

from collections.abc import Mapping

import numpy as np

from ..artifact.errors import CheckpointError
from ..artifact.tensor_format import Shape
from .checkpoint.source import Checkpoint, TensorInfo
from .config import DecoderConfig
from .weights import WeightSource

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# Parameter → GGUF name, for a layer.
LLAMA_GGUF_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_GGUF_NAMES: Mapping[str, str] = {
    **LLAMA_GGUF_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# Where the decoder sits in a Hugging Face checkpoint: on its own, without a head class, and inside
# a multimodal model as transformers 4 and 5 save it.
_HF_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")
_HF_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_HF_OTHER_MODALITIES = (
    "vision_tower.", "multi_modal_projector.",
    "model.vision_tower.", "model.multi_modal_projector.",
)  # fmt: skip


def parameter_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every parameter of the decoder, in the order of the forward pass, with its shape
    ([out, in] for a matrix)."""
    hidden, wide = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden)}

    def linear(name: str, out: int, inputs: int, *, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out, inputs)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            linear(f"{layer}.self_attn.{name}", size, hidden, bias=config.attention_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        linear(f"{layer}.self_attn.o_proj", hidden, q_size, bias=config.attention_output_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.post_norms:
            shapes[f"{layer}.pre_feedforward_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", wide, hidden, bias=config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", wide, hidden, bias=config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, wide, bias=config.mlp_bias)
        if config.post_norms:
            shapes[f"{layer}.post_feedforward_layernorm.weight"] = (hidden,)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def hf_weight_map(
    config: DecoderConfig, tensors: Mapping[str, TensorInfo], *, norm_offset: float = 0.0
) -> dict[str, WeightSource]:
    """The map for a Hugging Face checkpoint with split or fused projections. `norm_offset` is
    added to every RMSNorm weight (Gemma computes with weight + 1)."""
    prefix = next((p for p in _HF_PREFIXES if f"{p}embed_tokens.weight" in tensors), "model.")
    head = next((name for name in _HF_HEADS if name in tensors), HEAD)
    sources: dict[str, WeightSource] = {}
    for parameter in parameter_shapes(config):
        name = head if parameter == HEAD else prefix + parameter.removeprefix("model.")
        add = norm_offset if parameter.endswith("norm.weight") else 0.0
        sources[parameter] = _fused_source(config, name, tensors) or WeightSource(name, add=add)
    return sources


def _fused_source(
    config: DecoderConfig, name: str, tensors: Mapping[str, TensorInfo]
) -> WeightSource | None:
    """The rows of `qkv_proj` or `gate_up_proj` (Phi-3's names) that are the projection `name`."""
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    for fused, parts in (
        ("qkv_proj", {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}),
        ("gate_up_proj", dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)),
    ):
        start = 0
        for part, size in parts.items():
            fused_name = name.replace(f".{part}.", f".{fused}.")
            if fused_name != name and fused_name in tensors and name not in tensors:
                return WeightSource(fused_name, rows=slice(start, start + size))
            start += size
    return None


def gguf_weight_map(
    config: DecoderConfig, layer_names: Mapping[str, str], *, interleaved_qk: bool = False
) -> dict[str, WeightSource]:
    """The map for a GGUF. `interleaved_qk` undoes the row order that llama.cpp's converter gives
    Q and K of some architectures (weights and biases)."""
    sources = {
        EMBEDDING: WeightSource("token_embd.weight"),
        FINAL_NORM: WeightSource("output_norm.weight"),
        HEAD: WeightSource("output.weight"),
    }
    rows = {
        "self_attn.q_proj": halves_from_pairs(config.num_attention_heads, config.head_dim),
        "self_attn.k_proj": halves_from_pairs(config.num_key_value_heads, config.head_dim),
    }
    for parameter in parameter_shapes(config):
        if parameter in sources:
            continue
        _, _, layer, rest = parameter.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        sources[parameter] = WeightSource(
            f"blk.{layer}.{layer_names[module]}.{kind}",
            rows=rows.get(module) if interleaved_qk else None,
        )
    return {parameter: sources[parameter] for parameter in parameter_shapes(config)}


def halves_from_pairs(num_heads: int, head_dim: int) -> np.ndarray:
    """Row numbers, [num_heads * head_dim] int64, that turn each head's rows from neighbouring
    pairs (0, h, 1, h + 1, …; h = head_dim / 2) back into halves (0, 1, …, h, h + 1, …)."""
    pairs = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def check_weight_map(
    config: DecoderConfig, sources: Mapping[str, WeightSource], checkpoint: Checkpoint
) -> None:
    """Raise one CheckpointError that lists every missing, unexpected and misshapen tensor."""
    tensors = checkpoint.tensors
    shapes = parameter_shapes(config)
    missing = sorted({s.name for s in sources.values() if s.name not in tensors}, key=_natural)
    used = {source.name for source in sources.values()}
    unexpected = [n for n in tensors if n not in used and not _is_harmless(n, config, used)]
    problems: list[str] = []
    if missing:
        problems.append(f"missing {_listing(missing)}")
        if sources.get(HEAD) is not None and sources[HEAD].name in missing:
            problems.append("the config does not tie the head to the embedding")
    if unexpected:
        problems.append(f"unexpected {_listing(sorted(unexpected, key=_natural))}")
    wrong = []
    taken = _rows_taken(sources, shapes)
    for parameter, source in sources.items():
        if source.name in tensors:
            expected = (taken[source.name], *shapes[parameter][1:])
            shape = tensors[source.name].shape
            if shape != expected:
                wrong.append(f"{source.name} {list(shape)} instead of {list(expected)}")
    if wrong:
        problems.append(f"wrong shape: {_listing(list(dict.fromkeys(wrong)))}")
    if problems:
        raise CheckpointError(
            f"{checkpoint.path.name}: tensors do not fit a {config.model_type} model with this "
            f"config: {'; '.join(problems)}"
        )


def _rows_taken(sources: Mapping[str, WeightSource], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Rows each checkpoint tensor must have: those of all parameters cut out of it."""
    taken: dict[str, int] = {}
    for parameter, source in sources.items():
        taken[source.name] = taken.get(source.name, 0) + shapes[parameter][0]
    return taken


def _is_harmless(name: str, config: DecoderConfig, used: set[str]) -> bool:
    """Whether an unused tensor says nothing that the decoder does not know already."""
    if name.endswith("rotary_emb.inv_freq") or name == "rope_freqs.weight":
        return True  # computed from the config, or read into it
    if name in _HF_HEADS and config.tie_word_embeddings:
        return True  # a copy of the embedding
    is_multimodal = any("language_model." in n for n in used)
    return is_multimodal and name.startswith(_HF_OTHER_MODALITIES)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _listing(items: list[str], limit: int = 8) -> str:
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return f"{', '.join(items[:limit])}{rest}"
