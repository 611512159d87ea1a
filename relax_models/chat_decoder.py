"""The decoder as clients of MLC's model libraries call it: `embed`, then `prefill` or `decode`.

One sequence goes through at a time. The sequences' state is an object of the runtime
(`native/web/kv_state.cc`) that the client passes on: it has the pages, a tensor for each layer, and
the integers of the step.
"""

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn

from . import operators as ops
from .config import DecoderConfig
from .decoder import DecoderForCausalLM, KVState, page_shape
from .paged_attention import PAGE_SIZE

CREATE_STATE = "create_tir_paged_kv_cache"
"""The function by which clients make the state; the name is MLC's."""


class ChatState(nn.Object):
    """The state, as an argument of a function."""

    def __init__(self, _expr: relax.Expr, _name: str = "kv_state") -> None:
        super().__init__(_expr=_expr, _name=_name)


class ChatDecoder(DecoderForCausalLM):
    """`DecoderForCausalLM` under MLC's contract."""

    def embed(self, input_ids: nn.Tensor) -> nn.Tensor:
        """Scaled rows of the embedding: [n] int32 → [n, hidden_size] float32."""
        return ops.embedding(input_ids, self.model.embed_tokens, self.config.embedding_scale)

    def prefill(self, input_embed: nn.Tensor, kv_state: ChatState) -> tuple[nn.Tensor, ChatState]:
        """Logits of the last token, [1, 1, vocab_size] float32, from embeddings
        [1, n, hidden_size]; the state is given back."""
        hidden = self.config.hidden_size
        num_tokens = input_embed.shape[1]
        positions, slots, tiles, tables, rows = _step_inputs(kv_state, num_tokens)
        tables_ = [
            ops.rotary_table(positions, freq.inv_freq, rope.attention_factor)
            for freq, rope in zip(self.rope, self.config.ropes, strict=True)
        ]
        kv = KVState(
            _pages(kv_state, self.config, self.kv_dtype), tables, positions, tiles, slots, tables_
        )
        x = nn.op.reshape(input_embed, (num_tokens, hidden))
        for layer in self.model.layers:
            x = layer(x, kv)
        logits = self.logits(x, rows)
        return nn.op.reshape(logits, (1, 1, self.config.vocab_size)), kv_state

    def decode(self, input_embed: nn.Tensor, kv_state: ChatState) -> tuple[nn.Tensor, ChatState]:
        """`prefill` of one token."""
        return self.prefill(input_embed, kv_state)

    def spec(self) -> Any:
        hidden, mode = self.config.hidden_size, {"param_mode": "plain", "effect_mode": "none"}

        def forward(num_tokens: int | str) -> dict[str, Any]:
            return {
                "input_embed": nn.spec.Tensor([1, num_tokens, hidden], "float32"),
                "kv_state": nn.spec.Object(object_type=ChatState),
                "$": mode,
            }

        return nn.spec.ModuleSpec.from_raw(
            {
                "embed": {"input_ids": nn.spec.Tensor(["num_tokens"], "int32"), "$": mode},
                "prefill": forward("num_tokens"),
                "decode": forward(1),
            },
            self,
        )


def _call(name: str, *args: relax.Expr, type_: relax.Type) -> relax.Var:
    call = relax.op.call_pure_packed(name, *args, ty_args=[type_])
    return relax.BlockBuilder.current().emit(call)


def _as(expr: relax.Expr, shape: list[Any], dtype: str) -> nn.Tensor:
    """`expr` with the shape that it must have when it runs."""
    builder = relax.BlockBuilder.current()
    return nn.Tensor(_expr=builder.match_cast(expr, relax.TensorType(shape, dtype)))


def _step_inputs(state: ChatState, num_tokens: Any) -> list[nn.Tensor]:
    """positions, slots, query_tiles, block_tables and logit_rows of one sequence."""
    shapes: list[list[Any]] = [
        [num_tokens], [num_tokens], [_size("num_tiles"), 3], [1, _size("num_blocks")], [1],
    ]  # fmt: skip
    types = [relax.TensorType(dtype="int32", ndim=len(shape)) for shape in shapes]
    found = _call("everycast.kv_state_inputs", state._expr, type_=relax.TupleType(types))
    builder = relax.BlockBuilder.current()
    return [
        _as(builder.emit(relax.TupleGetItem(found, i)), shape, "int32")
        for i, shape in enumerate(shapes)
    ]


def _pages(state: ChatState, config: DecoderConfig, dtype: str) -> list[nn.Tensor]:
    shape = page_shape(config, _size("num_pages"), config.num_hidden_layers)
    type_ = relax.TensorType(dtype=dtype, ndim=len(shape))
    name = "everycast.kv_state_pages"
    return [
        _as(_call(name, state._expr, relax.prim_value(layer), type_=type_), shape, dtype)
        for layer in range(config.num_hidden_layers)
    ]


def _size(name: str) -> tirx.Var:
    return tirx.Var(name, "int64")


def create_state_function(config: DecoderConfig, kv_dtype: str, query_tile: int) -> relax.Function:
    """(max_batch_size, max_total_seq_len, prefill_chunk_size, page_size, support_sliding_window),
    each a shape of one number → the state. Windows are the model's own: the last one is ignored."""
    names = (
        "max_batch_size", "max_total_seq_len", "prefill_chunk_size", "page_size",
        "support_sliding_window",
    )  # fmt: skip
    inputs = [relax.Var(name, relax.ShapeType([_size(f"{name}_")])) for name in names]
    rows, width = 2 * config.num_key_value_heads, PAGE_SIZE * config.head_dim
    layout = relax.ShapeExpr([config.num_hidden_layers, PAGE_SIZE, rows, width, query_tile])
    builder = relax.BlockBuilder()
    with builder.function(CREATE_STATE, inputs):
        state = builder.emit(
            relax.op.call_pure_packed(
                "everycast.kv_state_create", *inputs[:4], layout, tvm.ir.StringImm(kv_dtype),
                ty_args=[relax.ObjectType()],
            )
        )  # fmt: skip
        builder.emit_func_output(state)
    return builder.get()[CREATE_STATE].with_attr("global_symbol", CREATE_STATE)
