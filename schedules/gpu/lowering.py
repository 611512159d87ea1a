"""Which kernel each operator of a model gets on a GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax

from ...artifact.tensor_format import TensorFormat
from ..passes.lower_operators import Handler, Lowering
from . import attention, embedding, norm, rotary
from .attention_block import AttentionShape
from .limits import GpuLimits
from .linear import linear
from .linear_operator import LinearOperator
from .weight import GpuWeight


def gpu_handlers(limits: GpuLimits) -> dict[str, Handler]:
    """Operator kind → what lowers it, for `lower_operators`. Weights stay as they are stored."""
    gpu = _GpuLowering(limits)
    return {
        "embedding": gpu.embedding,
        "linears": gpu.linears,
        "linear_add": gpu.linear_add,
        "gated_mlp": gpu.gated_mlp,
        "rms_norm": gpu.rms_norm,
        "rotary_table": gpu.rotary_table,
        "rotate_and_append": gpu.rotate_and_append,
        "attention": gpu.attention,
        "take_rows": gpu.take_rows,
    }


def _weight(description: Mapping[str, Any]) -> GpuWeight:
    fmt = TensorFormat(
        description["dtype"], description["bits"], description["group_size"],
        description["zero_point"], description["layout"],
    )  # fmt: skip
    return GpuWeight(fmt, description["n"], description["k"])


def _shape(x: relax.Expr) -> list[Any]:
    return list(x.ty.shape)


class _GpuLowering:
    def __init__(self, limits: GpuLimits) -> None:
        self.limits = limits

    # ---- operators with weights

    def embedding(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        table = _weight(op["weight"])
        func = embedding.embedding(table, op["scale"], self.limits)
        return lowering.call(func, args, [((_shape(args[0])[0], table.k), "float32")])

    def linears(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        """A kernel for each weight: kernels of all would need more buffers than some devices
        bind."""
        x, rest = args[0], args[1:]
        outputs = []
        for description, bias in zip(op["weights"], op["biases"], strict=True):
            operator = LinearOperator((_weight(description),), (bias,))
            operands, rest = _split(operator, rest)
            outputs.append(lowering.emit(self._call(lowering, operator, [x, *operands])))
        return outputs[0] if len(outputs) == 1 else relax.Tuple(outputs)

    def linear_add(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        operator = LinearOperator((_weight(op["weight"]),), (op["bias"],), residual=True)
        return self._call(lowering, operator, args)

    def gated_mlp(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        weights = tuple(_weight(description) for description in op["weights"])
        operator = LinearOperator(weights, tuple(op["biases"]), activation=op["activation"])
        return self._call(lowering, operator, args)

    def _call(
        self, lowering: Lowering, operator: LinearOperator, args: Sequence[relax.Expr]
    ) -> relax.Expr:
        output = ((_shape(args[0])[0], operator.n), "float32")
        return lowering.call(linear(operator, self.limits), args, [output])

    # ---- operators without weights

    def rms_norm(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        func = norm.rms_norm(op["size"], op["epsilon"], op["residual"], self.limits)
        # Rows of heads are a multiple of the tokens: then the number of tokens comes as well.
        tensors = args[: 3 if op["residual"] else 2]
        return lowering.call(func, tensors, [(tuple(_shape(args[0])), "float32")])

    def take_rows(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        x, rows = args
        size = _shape(x)[1]
        func = norm.take_rows(int(size), self.limits)
        return lowering.call(func, args, [((_shape(rows)[0], size), "float32")])

    def rotary_table(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        func = rotary.rotary_table(op["half"], op["scale"], self.limits)
        return lowering.call(func, args, [((_shape(args[0])[0], 2 * op["half"]), "float32")])

    def rotate_and_append(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        *tensors, layer = args
        q, pages = tensors[0], tensors[5]
        outputs = [(tuple(_shape(q)), "float32"), (tuple(_shape(pages)), op["kv_dtype"])]
        func = rotary.rotate_and_append(limits=self.limits, **_constants(op))
        return lowering.call(func, tensors, outputs, scalars=[layer], inplace=[-1, 5])

    def attention(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        *tensors, layer = args
        names = ("num_heads", "num_kv_heads", "head_dim", "page_size", "kv_dtype")
        shape = AttentionShape(**{name: op[name] for name in names})
        func = attention.attention(shape, op["scale"], op["window"], self.limits)
        output = (tuple(_shape(tensors[0])), "float32")
        workspace = (attention.splits_shape(shape, self.limits), "float32")
        both = lowering.emit(lowering.call(func, tensors, [output, workspace], scalars=[layer]))
        return relax.TupleGetItem(both, 0)


def _split(
    operator: LinearOperator, args: Sequence[relax.Expr]
) -> tuple[Sequence[relax.Expr], Sequence[relax.Expr]]:
    """The operands of the first weight in args, and the rest."""
    count = len(operator.weights[0].format.parts(1, 1)) + operator.biases[0]
    return args[:count], args[count:]


def _constants(op: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in op.items() if name != "kind"}
