"""A Llama-like decoder, from its configuration: the one forward pass of all supported models.

m tokens of b sequences go through in one ragged batch, prefill chunks and decode steps mixed.
"""

from typing import Any

from tvm.relax.frontend import nn

from . import operators as ops
from .config import DecoderConfig
from .layers import Embedding, Linear, RMSNorm
from .paged_attention import PAGE_SIZE


def page_shape(config: DecoderConfig, num_pages: Any, page_tensors: int) -> list[Any]:
    """[layers, num_pages, …] of each of the tensors that keys and values lie in."""
    rows, width = 2 * config.num_key_value_heads, PAGE_SIZE * config.head_dim
    return [config.num_hidden_layers // page_tensors, num_pages, rows, width]


class KVState:
    """What attention needs beside q, k and v. The pages, in tensors of as many layers each, are
    replaced after every append."""

    def __init__(
        self,
        pages: list[nn.Tensor],
        block_tables: nn.Tensor,
        positions: nn.Tensor,
        query_tiles: nn.Tensor,
        slots: nn.Tensor,
        rotary_tables: list[nn.Tensor],
    ) -> None:
        self.pages = pages
        self.block_tables = block_tables
        self.positions = positions
        self.query_tiles = query_tiles
        self.slots = slots
        self.rotary_tables = rotary_tables

    def layer_pages(self, layer: int) -> tuple[nn.Tensor, int]:
        """The pages with a layer's keys and values, and its number among the layers in them."""
        tensor, number = divmod(layer, self._layers)
        return self.pages[tensor], number

    def replace_pages(self, layer: int, pages: nn.Tensor) -> None:
        """What `layer_pages` gives from now on."""
        self.pages[layer // self._layers] = pages

    @property
    def _layers(self) -> int:
        """Layers of a tensor."""
        layers: int = self.pages[0].shape[0]
        return layers


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.config, self.layer = config, layer
        self.q_proj = Linear(hidden, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = Linear(hidden, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = Linear(
            config.num_attention_heads * head_dim, hidden, bias=config.attention_output_bias
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, x: nn.Tensor, kv: KVState) -> nn.Tensor:
        """Everything but the output projection: [m, hidden] → [m, heads · head_dim]."""
        config = self.config
        q, k, v = ops.linears(x, self.q_proj, self.k_proj, self.v_proj, role="attention")
        if config.qk_norm:
            q = self._norm_heads(q, self.q_norm)
            k = self._norm_heads(k, self.k_norm)
        rotary = kv.rotary_tables[config.layer_ropes[self.layer]]
        pages, number = kv.layer_pages(self.layer)
        q, pages = ops.rotate_and_append(
            q, k, v, rotary, kv.slots, pages, config=config, layer=number
        )
        kv.replace_pages(self.layer, pages)
        return ops.attention(
            q,
            pages,
            kv.block_tables,
            kv.positions,
            kv.query_tiles,
            config=config,
            layer=number,
            window=config.layer_windows[self.layer],
        )

    def _norm_heads(self, x: nn.Tensor, norm: RMSNorm) -> nn.Tensor:
        rows, width = x.shape
        heads = width // self.config.head_dim
        by_head = nn.op.reshape(x, (rows * heads, self.config.head_dim))
        return nn.op.reshape(ops.rms_norm(by_head, norm), (rows, width))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.activation
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Everything but the output projection: [m, hidden] → [m, intermediate]."""
        return ops.gated_mlp(x, self.gate_proj, self.up_proj, self.activation)


class DecoderLayer(nn.Module):
    """Norms before attention and MLP; with `post_norms` (Gemma) also after, before the sum."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps)

        self.post_norms = config.post_norms
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        if config.post_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()

    def forward(self, x: nn.Tensor, kv: KVState) -> nn.Tensor:
        attended = self.self_attn(ops.rms_norm(x, self.input_layernorm), kv)
        if not self.post_norms:
            x = ops.linear_add(attended, self.self_attn.o_proj, x, role="attention")
            inner = self.mlp(ops.rms_norm(x, self.post_attention_layernorm))
            return ops.linear_add(inner, self.mlp.down_proj, x, role="mlp")
        (projected,) = ops.linears(attended, self.self_attn.o_proj, role="attention")
        x = ops.rms_norm(projected, self.post_attention_layernorm, residual=x)
        inner = self.mlp(ops.rms_norm(x, self.pre_feedforward_layernorm))
        (projected,) = ops.linears(inner, self.mlp.down_proj, role="mlp")
        return ops.rms_norm(projected, self.post_feedforward_layernorm, residual=x)


class DecoderModel(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class RotaryFrequencies(nn.Module):
    """Inverse frequencies of one kind of RoPE, kept beside the weights: [rotary_dim / 2]."""

    def __init__(self, rotary_dim: int) -> None:
        self.inv_freq = nn.Parameter((rotary_dim // 2,), "float32")


class DecoderForCausalLM(nn.Module):
    """The model as a library exports it: `forward` for a ragged batch, `logits` for chosen rows,
    and where the target has it `leading_logits`.

    Its keys and values lie in `page_tensors` tensors, which divide the layers.
    """

    has_leading_logits = False
    """Whether `leading_logits` is exported."""

    def __init__(
        self, config: DecoderConfig, *, kv_dtype: str = "float16", page_tensors: int = 1
    ) -> None:
        self.config, self.kv_dtype, self.page_tensors = config, kv_dtype, page_tensors
        self.model = DecoderModel(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.rope = nn.ModuleList([RotaryFrequencies(rope.rotary_dim) for rope in config.ropes])

    def forward(
        self,
        input_ids: nn.Tensor,
        positions: nn.Tensor,
        slots: nn.Tensor,
        query_tiles: nn.Tensor,
        block_tables: nn.Tensor,
        pages: nn.Tensor | list[nn.Tensor],
    ) -> tuple[nn.Tensor, nn.Tensor | list[nn.Tensor]]:
        """Hidden states before the last norm, [m, hidden_size] float32, and the pages: a tensor, or
        a list if there are several."""
        tables = [
            ops.rotary_table(positions, freq.inv_freq, rope.attention_factor)
            for freq, rope in zip(self.rope, self.config.ropes, strict=True)
        ]
        several = isinstance(pages, list)
        kv = KVState(
            list(pages) if several else [pages], block_tables, positions, query_tiles, slots, tables
        )
        x = ops.embedding(input_ids, self.model.embed_tokens, self.config.embedding_scale)
        for layer in self.model.layers:
            x = layer(x, kv)
        return x, kv.pages if several else kv.pages[0]

    def logits(self, hidden: nn.Tensor, rows: nn.Tensor) -> nn.Tensor:
        """Logits of the tokens `rows`: [m, hidden_size], [r] int32 → [r, vocab_size] float32."""
        (logits,) = ops.linears(self._normed(hidden, rows), self.head, role="head")
        return logits

    def leading_logits(self, hidden: nn.Tensor, rows: nn.Tensor, num_ids: nn.Tensor) -> nn.Tensor:
        """As `logits`, for the arg max over the first `num_ids` [1] int32: `ops.leading_logits`."""
        return ops.leading_logits(self._normed(hidden, rows), num_ids, self.head)

    @property
    def head(self) -> Embedding | Linear:
        """What the logits are computed with: the embedding, where they are tied."""
        return self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head

    def _normed(self, hidden: nn.Tensor, rows: nn.Tensor) -> nn.Tensor:
        return ops.rms_norm(ops.take_rows(hidden, rows), self.model.norm)

    def spec(self) -> Any:
        """Inputs of the exported functions, for `export_tvm`."""
        config, mode = self.config, {"param_mode": "plain", "effect_mode": "none"}
        page = page_shape(config, "num_pages", self.page_tensors)
        pages = nn.spec.Tensor(page, self.kv_dtype)
        if self.page_tensors > 1:
            pages = [pages] * self.page_tensors
        rows = {
            "hidden": nn.spec.Tensor(["num_tokens", config.hidden_size], "float32"),
            "rows": nn.spec.Tensor(["num_rows"], "int32"),
        }
        leading = {**rows, "num_ids": nn.spec.Tensor([1], "int32"), "$": mode}
        return nn.spec.ModuleSpec.from_raw(
            {
                "forward": {
                    "input_ids": nn.spec.Tensor(["num_tokens"], "int32"),
                    "positions": nn.spec.Tensor(["num_tokens"], "int32"),
                    "slots": nn.spec.Tensor(["num_tokens"], "int32"),
                    "query_tiles": nn.spec.Tensor(["num_tiles", 3], "int32"),
                    "block_tables": nn.spec.Tensor(["num_sequences", "num_blocks"], "int32"),
                    "pages": pages,
                    "$": mode,
                },
                "logits": {**rows, "$": mode},
                **({"leading_logits": leading} if self.has_leading_logits else {}),
            },
            self,
        )
