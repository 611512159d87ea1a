"""What a decoder computes, as coarse operators that targets lower.

Each operator is emitted as a call to a plain, unscheduled PrimFunc that says exactly what is
computed, with an attribute `everycast.op` (JSON) that names the operator and its constants. A
target's lowering replaces the calls it has kernels for (`schedules/lower.py`); the plain PrimFunc
stays the oracle and the portable fallback.

Shapes: m tokens (symbolic), H hidden size, D head size, V vocabulary. Activations are float32.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from . import paged_attention
from .config import DecoderConfig
from .layers import Linear, RMSNorm, Weight
from .weight_expr import element

ATTRIBUTE = "everycast.op"
Activation = Literal["silu", "gelu_tanh"]
Role = Literal["attention", "mlp", "head"]
"""What a linear layer is for: targets may compute some more exactly than others."""


def _describe(kind: str, **constants: Any) -> dict[str, str]:
    return {ATTRIBUTE: json.dumps({"kind": kind, **constants}, sort_keys=True)}


def _with_description(func: tirx.PrimFunc, kind: str, **constants: Any) -> tirx.PrimFunc:
    return func.without_attr("global_symbol").with_attrs(_describe(kind, **constants))


def _weight(weight: Weight) -> dict[str, Any]:
    fmt = weight.format
    return {
        "n": weight.n,
        "k": weight.k,
        "dtype": fmt.dtype,
        "bits": fmt.bits,
        "group_size": fmt.group_size,
        "zero_point": fmt.zero_point,
        "layout": fmt.layout,
    }


def _matmul(x: te.Tensor, weight: Weight, parts: Sequence[te.Tensor], name: str) -> te.Tensor:
    k = te.reduce_axis((0, weight.k), name="k")
    return te.compute(
        (x.shape[0], weight.n),
        lambda i, j: te.sum(x[i, k] * element(weight.format, parts, j, k), axis=k),
        name=name,
    )


def _arguments(layer: Weight) -> list[nn.Tensor]:
    """What a layer adds to a call: the parts of its weight, then its bias where it has one."""
    return [*layer.parts(), *([layer.bias] if layer.bias is not None else [])]


def _affine(
    x: te.Tensor, layer: Weight, args: Sequence[te.Tensor]
) -> tuple[te.Tensor, Sequence[te.Tensor]]:
    """x Wᵀ (+ bias) from the layer's call arguments, and the arguments that follow them."""
    count = len(layer.parts())
    y = _matmul(x, layer, args[:count], "linear")
    if layer.bias is None:
        return y, args[count:]
    bias = args[count]
    return te.compute(y.shape, lambda i, j: y[i, j] + bias[j], name="bias"), args[count + 1 :]


def embedding(input_ids: nn.Tensor, table: Weight, scale: float = 1.0) -> nn.Tensor:
    """Rows of `table` times `scale`: [m] int32 → [m, H]. Call arguments: ids, parts."""

    def compute(ids: te.Tensor, *parts: te.Tensor) -> te.Tensor:
        return te.compute(
            (ids.shape[0], table.k),
            lambda i, j: element(table.format, parts, ids[i], j) * tirx.const(scale, "float32"),
            name="embedding",
        )

    attrs = _describe("embedding", scale=scale, weight=_weight(table))
    return op.tensor_expr_op(compute, "embedding", [input_ids, *table.parts()], attrs=attrs)


def linears(x: nn.Tensor, *layers: Weight, role: Role) -> tuple[nn.Tensor, ...]:
    """Every layer applied to the same x: [m, K] → [m, N_i] each.

    Call arguments: x, then for each layer its parts and, where it has one, its bias.
    """

    def compute(x_te: te.Tensor, *args: te.Tensor) -> te.Tensor | list[te.Tensor]:
        outputs = []
        rest: Sequence[te.Tensor] = args
        for layer in layers:
            y, rest = _affine(x_te, layer, rest)
            outputs.append(y)
        return outputs if len(outputs) > 1 else outputs[0]

    args = [x, *(argument for layer in layers for argument in _arguments(layer))]
    attrs = _describe(
        "linears",
        role=role,
        weights=[_weight(layer) for layer in layers],
        biases=[layer.bias is not None for layer in layers],
    )
    result = op.tensor_expr_op(compute, "linears", args, attrs=attrs)
    return tuple(result) if isinstance(result, list | tuple) else (result,)


def leading_logits(x: nn.Tensor, num_ids: nn.Tensor, head: Weight) -> nn.Tensor:
    """x Wᵀ, [m, N], for whoever wants the arg max over the first `num_ids` [1] int32 of each row:
    targets may leave the rest of a row inexact, as long as it is lower than its highest value.

    Call arguments: x, num_ids, parts.
    """

    def compute(x_te: te.Tensor, _: te.Tensor, *parts: te.Tensor) -> te.Tensor:
        return _matmul(x_te, head, parts, "leading_logits")

    attrs = _describe("leading_logits", weight=_weight(head))
    return op.tensor_expr_op(compute, "leading_logits", [x, num_ids, *head.parts()], attrs=attrs)


def linear_add(x: nn.Tensor, layer: Linear, residual: nn.Tensor, *, role: Role) -> nn.Tensor:
    """residual + x Wᵀ (+ bias): [m, N]. Call arguments: x, parts, (bias,) residual."""

    def compute(x_te: te.Tensor, *args: te.Tensor) -> te.Tensor:
        y, rest = _affine(x_te, layer, args)
        return te.compute(y.shape, lambda i, j: rest[0][i, j] + y[i, j], name="add")

    attrs = _describe("linear_add", role=role, weight=_weight(layer), bias=layer.bias is not None)
    return op.tensor_expr_op(compute, "linear_add", [x, *_arguments(layer), residual], attrs=attrs)


def _activate(value: tirx.Expr, activation: Activation) -> tirx.Expr:
    if activation == "silu":
        return value / (tirx.const(1, "float32") + te.exp(-value))
    inner = tirx.const(0.7978845608028654, "float32") * (
        value + tirx.const(0.044715, "float32") * value * value * value
    )
    return tirx.const(0.5, "float32") * value * (tirx.const(1, "float32") + te.tanh(inner))


def gated_mlp(x: nn.Tensor, gate: Linear, up: Linear, activation: Activation) -> nn.Tensor:
    """activation(x Wgᵀ (+ bg)) · (x Wuᵀ (+ bu)): [m, H] → [m, F].

    Call arguments: x, gate parts, (gate bias,) up parts, (up bias).
    """

    def compute(x_te: te.Tensor, *args: te.Tensor) -> te.Tensor:
        g, rest = _affine(x_te, gate, args)
        u, _ = _affine(x_te, up, rest)
        return te.compute(
            g.shape, lambda i, j: _activate(g[i, j], activation) * u[i, j], name="gated"
        )

    attrs = _describe(
        "gated_mlp", role="mlp", weights=[_weight(gate), _weight(up)],
        biases=[gate.bias is not None, up.bias is not None], activation=activation,
    )  # fmt: skip
    args = [x, *_arguments(gate), *_arguments(up)]
    return op.tensor_expr_op(compute, "gated_mlp", args, attrs=attrs)


def rms_norm(x: nn.Tensor, norm: RMSNorm, *, residual: nn.Tensor | None = None) -> nn.Tensor:
    """x / rms(x) · weight over the last axis, (residual +) [rows, size].

    Call arguments: x, weight, (residual).
    """
    size = norm.size

    def compute(x_te: te.Tensor, weight: te.Tensor, *rest: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, size), name="k")
        squares = te.compute(
            (x_te.shape[0],), lambda i: te.sum(x_te[i, k] * x_te[i, k], axis=k), name="squares"
        )

        def value(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
            mean = squares[i] * tirx.const(1.0 / size, "float32")
            y = x_te[i, j] * te.rsqrt(mean + tirx.const(norm.epsilon, "float32")) * weight[j]
            return rest[0][i, j] + y if rest else y

        return te.compute(x_te.shape, value, name="rms_norm")

    args = [x, norm.weight, *([residual] if residual is not None else [])]
    attrs = _describe("rms_norm", size=size, epsilon=norm.epsilon, residual=residual is not None)
    return op.tensor_expr_op(compute, "rms_norm", args, attrs=attrs)


def rotary_table(positions: nn.Tensor, inv_freq: nn.Tensor, scale: float) -> nn.Tensor:
    """cos, then sin, of position · inverse frequency, times `scale`: [m] int32 → [m, rotary_dim].

    Computed once a forward pass for all layers. Call arguments: positions, inv_freq [rotary/2].
    """
    half = int(inv_freq.shape[0])

    def compute(pos: te.Tensor, freq: te.Tensor) -> te.Tensor:
        def value(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
            angle = pos[i].astype("float32") * freq[j % half]
            wave = te.if_then_else(j < half, te.cos(angle), te.sin(angle))
            return wave * tirx.const(scale, "float32")

        return te.compute((pos.shape[0], 2 * half), value, name="rotary_table")

    attrs = _describe("rotary_table", half=half, scale=scale)
    return op.tensor_expr_op(compute, "rotary_table", [positions, inv_freq], attrs=attrs)


def take_rows(x: nn.Tensor, rows: nn.Tensor) -> nn.Tensor:
    """x[rows]: [m, H], [r] int32 → [r, H]."""

    def compute(x_te: te.Tensor, rows_te: te.Tensor) -> te.Tensor:
        shape = (rows_te.shape[0], x_te.shape[1])
        return te.compute(shape, lambda i, j: x_te[rows_te[i], j], name="take_rows")

    return op.tensor_expr_op(compute, "take_rows", [x, rows], attrs=_describe("take_rows"))


def rotate_and_append(
    q: nn.Tensor,
    k: nn.Tensor,
    v: nn.Tensor,
    rotary: nn.Tensor,
    slots: nn.Tensor,
    pages: nn.Tensor,
    *,
    config: DecoderConfig,
    layer: int,
) -> tuple[nn.Tensor, nn.Tensor]:
    """Rotate q and k (RoPE, split halves), write k and v into the KV pages in place.

    q: [m, heads · D], k, v: [m, kv_heads · D], rotary: [m, rotary_dim], slots: [m] int32
    (page · page_size + offset), pages: see `paged_attention`. Gives the rotated q and the pages.
    Call arguments: q, k, v, rotary, slots, pages, layer.
    """
    shape = paged_attention.HeadShape.of(config, str(pages.dtype), int(rotary.shape[1]))
    func = _with_description(
        paged_attention.rotate_and_append(shape), "rotate_and_append", **shape.constants()
    )
    q_out, pages_out = op.tensor_ir_inplace_op(
        func,
        "rotate_and_append",
        [q, k, v, rotary, slots, pages, tirx.const(layer, "int64")],
        inplace_indices=[-1, 5],
        out=[
            nn.Tensor.placeholder(q.shape, "float32"),
            nn.Tensor.placeholder(pages.shape, pages.dtype),
        ],
    )
    return q_out, pages_out


def attention(
    q: nn.Tensor,
    pages: nn.Tensor,
    block_tables: nn.Tensor,
    positions: nn.Tensor,
    query_tiles: nn.Tensor,
    *,
    config: DecoderConfig,
    layer: int,
    window: int | None,
) -> nn.Tensor:
    """softmax(q kᵀ · scale) v over each token's own sequence up to its own position.

    q: [m, heads · D] rotated, block_tables: [b, w] int32, positions: [m] int32,
    query_tiles: [t, 3] int32 (sequence, first token, number of tokens): the tokens of a batch cut
    into tiles of one sequence each. With a window, key j is seen from i iff i - j < window.
    Call arguments: q, pages, block_tables, positions, query_tiles, layer.
    """
    shape = paged_attention.HeadShape.of(config, str(pages.dtype), 0)
    scale = config.attention_scale
    func = _with_description(
        paged_attention.attention(shape, scale, window),
        "attention", scale=scale, window=window, **shape.constants(),
    )  # fmt: skip
    return op.tensor_ir_op(
        func,
        "attention",
        [q, pages, block_tables, positions, query_tiles, tirx.const(layer, "int64")],
        out=nn.Tensor.placeholder(q.shape, "float32"),
    )
