"""The decoder's forward pass in plain NumPy, float32: what compiled models are compared with."""

from collections.abc import Mapping

import numpy as np
from everycast.relax_models.checkpoint.source import FLOAT_DTYPES, Checkpoint
from everycast.relax_models.config import DecoderConfig
from everycast.relax_models.rope import RopeConfig, inverse_frequencies
from everycast.relax_models.weights import WeightSource


def reference_logits(
    config: DecoderConfig, weights: Mapping[str, np.ndarray], token_ids: np.ndarray | list[int]
) -> np.ndarray:
    """Logits of every token of one sequence: [n] ids → [n, vocab_size] float32."""
    ids = np.asarray(token_ids)
    positions = np.arange(len(ids))
    x = weights["model.embed_tokens.weight"][ids] * np.float32(config.embedding_scale)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        w = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}

        def norm(x: np.ndarray, name: str, w: Mapping[str, np.ndarray] = w) -> np.ndarray:
            return rms_norm(x, w[f"{name}.weight"], config.rms_norm_eps)

        attended = _attention(config, layer, w, norm(x, "input_layernorm"), positions)
        if config.post_norms:
            x = x + norm(attended, "post_attention_layernorm")
            inner = _mlp(config, w, norm(x, "pre_feedforward_layernorm"))
            x = x + norm(inner, "post_feedforward_layernorm")
        else:
            x = x + attended
            x = x + _mlp(config, w, norm(x, "post_attention_layernorm"))
    x = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    logits: np.ndarray = x @ weights[head].T
    return logits


def _attention(
    config: DecoderConfig,
    layer: int,
    w: Mapping[str, np.ndarray],
    x: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    def heads(name: str) -> np.ndarray:  # [n, heads, head_dim]
        return _linear(w, f"self_attn.{name}_proj", x).reshape(len(x), -1, config.head_dim)

    q, k, v = heads("q"), heads("k"), heads("v")
    if config.qk_norm:
        q = rms_norm(q, w["self_attn.q_norm.weight"], config.rms_norm_eps)
        k = rms_norm(k, w["self_attn.k_norm.weight"], config.rms_norm_eps)
    rope = config.ropes[config.layer_ropes[layer]]
    q, k = rotate(q, positions, rope), rotate(k, positions, rope)

    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    window = config.layer_windows[layer]
    if window is not None:
        visible &= distance < window
    group = config.num_attention_heads // config.num_key_value_heads
    out = np.empty_like(q)
    for head in range(config.num_attention_heads):
        scores = q[:, head] @ k[:, head // group].T * np.float32(config.attention_scale)
        scores = np.where(visible, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = (scores / scores.sum(-1, keepdims=True)) @ v[:, head // group]
    return _linear(w, "self_attn.o_proj", out.reshape(len(x), -1))


def _mlp(config: DecoderConfig, w: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate = _linear(w, "mlp.gate_proj", x)
    if config.activation == "silu":
        gate = gate / (1 + np.exp(-np.clip(gate, -80, None)))
    else:
        inner = np.float32((2 / np.pi) ** 0.5) * (gate + np.float32(0.044715) * gate**3)
        gate = gate * (1 + np.tanh(inner)) / 2
    return _linear(w, "mlp.down_proj", gate * _linear(w, "mlp.up_proj", x))


def _linear(w: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    y: np.ndarray = x @ w[f"{name}.weight"].T
    if f"{name}.bias" in w:
        y += w[f"{name}.bias"]
    return y


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(eps))
    normed *= weight
    return normed


def rotate(x: np.ndarray, positions: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """RoPE on [n, heads, head_dim]."""
    angles = positions[:, None, None].astype(np.float32) * inverse_frequencies(rope)
    cos = np.cos(angles) * np.float32(rope.attention_factor)
    sin = np.sin(angles) * np.float32(rope.attention_factor)
    first, second = np.split(x, 2, -1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def float_weights(
    sources: Mapping[str, WeightSource], checkpoint: Checkpoint
) -> dict[str, np.ndarray]:
    """Every parameter as float32, GGUF blocks dequantized by the `gguf` package."""
    weights = {}
    for name, source in sources.items():
        values = checkpoint.read(source.name)
        dtype = checkpoint.tensors[source.name].dtype
        if dtype not in FLOAT_DTYPES:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            values = dequantize(values, GGMLQuantizationType[dtype])
        values = values.astype(np.float32)
        if source.rows is not None:
            values = values[source.rows]
        weights[name] = values + np.float32(source.add) if source.add else values
    return weights


def perplexity(logits: np.ndarray, token_ids: np.ndarray | list[int]) -> float:
    """exp of the mean negative log likelihood of tokens 1, 2, …: [n, vocab_size], [n] ids."""
    rows, targets = logits[:-1].astype(np.float64), np.asarray(token_ids)[1:]
    peak = rows.max(-1)
    log_sum = np.log(np.exp(rows - peak[:, None]).sum(-1)) + peak
    return float(np.exp(np.mean(log_sum - rows[np.arange(len(targets)), targets])))
