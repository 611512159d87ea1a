"""Which kernel each operator of a model gets on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax, tirx

from ...artifact.tensor_format import TensorFormat
from ..passes.lower_operators import Handler, Lowering
from . import attention, embedding, leading_logits, linear_inputs, norm, rotary
from .attention_state import Heads
from .isa import CpuIsa
from .linear_inputs import Activations
from .linear_operator import LinearOperator
from .linear_schedule import LinearSchedule
from .pack_weights import pack_func
from .packing import PackedWeight

Choose = Callable[[LinearOperator], LinearSchedule | None]
"""The schedule of an operator; None is the default one."""


def cpu_handlers(
    isa: CpuIsa, activations: Activations, choose: Choose = lambda operator: None
) -> dict[str, Handler]:
    """Operator kind → what lowers it, for `lower_operators`.

    `activations` says how the inputs of quantized linear layers are rounded, where the instruction
    set has integer kernels; elsewhere they stay float32. `choose` gives the schedule of each linear
    operator.
    """
    cpu = _CpuLowering(isa, activations, choose)
    return {
        "embedding": cpu.embedding,
        "linears": cpu.linears,
        "leading_logits": cpu.leading_logits,
        "linear_add": cpu.linear_add,
        "gated_mlp": cpu.gated_mlp,
        "rms_norm": cpu.rms_norm,
        "rotary_table": cpu.rotary_table,
        "rotate_and_append": cpu.rotate_and_append,
        "attention": cpu.attention,
        "take_rows": cpu.take_rows,
    }


def _format(weight: Mapping[str, Any]) -> TensorFormat:
    return TensorFormat(
        weight["dtype"], weight["bits"], weight["group_size"], weight["zero_point"],
        weight["layout"],
    )  # fmt: skip


def _shape(x: relax.Expr) -> list[Any]:
    return list(x.ty.shape)


class _CpuLowering:
    def __init__(self, isa: CpuIsa, activations: Activations, choose: Choose) -> None:
        self.isa, self.activations, self.choose = isa, activations, choose

    # ---- operators with weights

    def embedding(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        ids, *parts = args
        packed, weight = self._pack(lowering, op["weight"], parts, is_head=True)
        func = embedding.embedding(packed, op["scale"])
        return lowering.call(func, [ids, weight], [((_shape(ids)[0], packed.k), "float32")])

    def linears(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        x, *rest = args
        weights, operands, _ = self._weights(
            lowering, op["weights"], op["biases"], rest, is_head=op["role"] == "head"
        )
        terms, inputs = self._inputs(lowering, x, weights, op["role"])
        func = self._kernel(weights, op["biases"], terms)
        outputs = [((_shape(x)[0], weight.n), "float32") for weight in weights]
        return lowering.call(func, [*inputs, *operands], outputs)

    def leading_logits(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        x, num_ids, *parts = args
        head, weight = self._pack(lowering, op["weight"], parts, is_head=True)
        unread = head.num_blocks * head.lower_block_bytes
        lowering.note("leading_logits", {"unread_weight_bytes": unread})
        terms, inputs = self._inputs(lowering, x, [head], "head")
        shared, what = [*inputs, weight, num_ids], (head, self.isa, terms)
        m = _shape(x)[0]
        logits, rows = ((m, head.n), "float32"), ((m,), "int32")

        def call(func: tirx.PrimFunc, *outputs: Any, given: Sequence[relax.Expr] = shared) -> Any:
            made = lowering.emit(lowering.call(func, given, outputs))
            if len(outputs) == 1:
                return made
            return [relax.TupleGetItem(made, i) for i in range(len(outputs))]

        norms = call(leading_logits.group_norms(head), ((m, head.num_groups), "float32"), given=[x])
        y, highest = call(
            leading_logits.upper_logits(*what), logits,
            (leading_logits.highest_shape(head, m), "float32"),
        )  # fmt: skip
        least, doubts = call(
            leading_logits.least_highest(*what), ((m,), "float32"), rows, given=[*shared, highest]
        )
        given = [*shared, norms, highest, least, y, doubts]
        inplace = [len(given) - 2, len(given) - 1]
        refine = leading_logits.refine(*what)
        both = lowering.emit(lowering.call(refine, given, [logits, rows], inplace=inplace))
        y, doubts = (relax.TupleGetItem(both, i) for i in range(2))
        given = [*shared, doubts, y]
        refine = leading_logits.refine_doubted(*what)
        return lowering.call(refine, given, [logits], inplace=[len(given) - 1])

    def linear_add(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        x, *rest = args
        weights, operands, (residual,) = self._weights(lowering, [op["weight"]], [op["bias"]], rest)
        terms, inputs = self._inputs(lowering, x, weights, op["role"])
        func = self._kernel(weights, [op["bias"]], terms, residual=True)
        outputs = [((_shape(x)[0], weights[0].n), "float32")]
        return lowering.call(func, [*inputs, *operands, residual], outputs)

    def gated_mlp(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        x, *rest = args
        weights, operands, _ = self._weights(lowering, op["weights"], op["biases"], rest)
        terms, inputs = self._inputs(lowering, x, weights, op["role"])
        func = self._kernel(weights, op["biases"], terms, activation=op["activation"])
        outputs = [((_shape(x)[0], weights[0].n), "float32")]
        return lowering.call(func, [*inputs, *operands], outputs)

    def _kernel(
        self, weights: Sequence[PackedWeight], biases: Sequence[bool], terms: int, **options: Any
    ) -> tirx.PrimFunc:
        operator = LinearOperator(
            weights=tuple(weights), biases=tuple(biases), terms=terms, **options
        )
        return operator.kernel(self.isa, self.choose(operator))

    def _weights(
        self,
        lowering: Lowering,
        descriptions: Sequence[Mapping[str, Any]],
        biases: Sequence[bool],
        args: Sequence[relax.Expr],
        *,
        is_head: bool = False,
    ) -> tuple[list[PackedWeight], list[relax.Expr], Sequence[relax.Expr]]:
        """Packed weights, the kernel's operands for them (with biases), and the rest of args."""
        weights, operands = [], []
        for description, bias in zip(descriptions, biases, strict=True):
            count = len(_format(description).parts(1, 1))
            packed, variable = self._pack(lowering, description, args[:count], is_head=is_head)
            weights.append(packed)
            operands.append(variable)
            args = args[count:]
            if bias:
                operands.append(args[0])
                args = args[1:]
        return weights, operands, args

    def _pack(
        self,
        lowering: Lowering,
        description: Mapping[str, Any],
        parts: Sequence[relax.Expr],
        *,
        is_head: bool,
    ) -> tuple[PackedWeight, relax.Var]:
        """`is_head`: the weight is the head, or an embedding, which may be the head as well."""
        fmt = _format(description)
        planes = is_head and linear_inputs.has_planes(fmt, self.isa, self.activations)
        packed = PackedWeight(fmt, description["n"], description["k"], planes)
        # Packed alike, but not from the same shapes: NK and KN parts have packers of their own.
        key = f"{fmt.layout.lower()}_{packed.key}"
        variable = lowering.packed(parts, packed.num_bytes, key, pack_func(packed))
        return packed, variable

    def _inputs(
        self, lowering: Lowering, x: relax.Expr, weights: Sequence[PackedWeight], role: str
    ) -> tuple[int, list[relax.Expr]]:
        """Terms of the activations, and x in that form: itself, or the buffers of the terms."""
        terms = linear_inputs.num_terms(weights, self.isa, self.activations)
        if not terms:
            return 0, [x]
        specs = linear_inputs.activation_specs(weights, _shape(x)[0], terms)
        func = linear_inputs.activation_terms(weights, terms, self.activations, role, self.isa)
        rounded = lowering.emit(lowering.call(func, [x], specs))
        if len(specs) == 1:
            return terms, [rounded]
        return terms, [relax.TupleGetItem(rounded, i) for i in range(len(specs))]

    # ---- operators without weights

    def rms_norm(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        func = norm.rms_norm(op["size"], op["epsilon"], op["residual"])
        # Rows of heads are a multiple of the tokens: then the number of tokens comes as well.
        tensors = args[: 3 if op["residual"] else 2]
        return lowering.call(func, tensors, [(tuple(_shape(args[0])), "float32")])

    def take_rows(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        x, rows = args
        size = _shape(x)[1]
        shape = (_shape(rows)[0], size)
        return lowering.call(norm.take_rows(int(size)), args, [(shape, "float32")])

    def rotary_table(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        shape = (_shape(args[0])[0], 2 * op["half"])
        func = rotary.rotary_table(op["half"], op["scale"])
        return lowering.call(func, args, [(shape, "float32")])

    def rotate_and_append(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        *tensors, layer = args
        q, pages = tensors[0], tensors[5]
        outputs = [(tuple(_shape(q)), "float32"), (tuple(_shape(pages)), op["kv_dtype"])]
        func = rotary.rotate_and_append(**_constants(op))
        return lowering.call(func, tensors, outputs, scalars=[layer], inplace=[-1, 5])

    def attention(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        *tensors, layer = args
        q, _, tables, positions, tiles = tensors
        constants = _constants(op)
        heads = Heads(*(constants.pop(name) for name in ("num_heads", "num_kv_heads", "head_dim")))
        constants.pop("rotary_dim")
        func = attention.attention(heads=heads, isa=self.isa, **constants)
        output = (tuple(_shape(q)), "float32")
        workspace = (attention.splits_shape(_shape(tables)[0], heads), "float32")
        both = lowering.emit(lowering.call(func, tensors, [output, workspace], scalars=[layer]))
        out, parts = (relax.TupleGetItem(both, i) for i in range(2))
        merge = attention.merge_splits(heads=heads, window=constants["window"])
        args = [positions, tiles, parts, out]
        return lowering.call(merge, args, [output], inplace=[len(args) - 1])


def _constants(op: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in op.items() if name != "kind"}
