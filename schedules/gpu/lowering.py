"""Which kernel each operator of a model gets on a GPU."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx

from ...artifact.errors import CompileError
from ...artifact.tensor_format import TensorFormat
from ..passes.lower_operators import ATTRIBUTE, Handler, Lowering
from . import attention, embedding, norm, rotary
from .attention_block import AttentionShape
from .half_rows import half_rows, padded
from .limits import GpuLimits
from .linear import linear
from .linear_operator import LinearOperator
from .linear_schedule import LinearSchedule, default_schedule
from .matrix_gemm import can_use_matrices, workspace_size
from .row_parts import row_parts
from .thread_kernels import thread_attention, thread_rms_norm
from .weight import HALVES, GpuWeight, words_of

Choose = Callable[[LinearOperator, GpuLimits], LinearSchedule]
"""The schedule of a linear layer, from the limits that hold for all."""


def gpu_handlers(
    limits: GpuLimits,
    *,
    is_exact: bool = False,
    choose: Choose = lambda operator, limits: default_schedule(limits),
) -> dict[str, Handler]:
    """Operator kind → what lowers it, for `lower_operators`. Weights stay as they are stored.

    is_exact: nothing is rounded to halves to be multiplied.
    """
    gpu = _GpuLowering(replace(limits, matrix_tiles=()) if is_exact else limits, choose)
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


def has_float32_pages(module: tvm.IRModule) -> bool:
    """Whether the model that calls these operators is one in float32 throughout."""
    for func in module.functions.values():
        if isinstance(func, tirx.PrimFunc) and ATTRIBUTE in (func.attrs or {}):
            if json.loads(str(func.attrs[ATTRIBUTE])).get("kv_dtype") == "float32":
                return True
    return False


def _weight(description: Mapping[str, Any], limits: GpuLimits) -> GpuWeight:
    fmt = TensorFormat(
        description["dtype"], description["bits"], description["group_size"],
        description["zero_point"], description["layout"],
    )  # fmt: skip
    return GpuWeight(fmt, description["n"], description["k"], not limits.has_float16)


def _shape(x: relax.Expr) -> list[Any]:
    return list(x.ty.shape)


class _GpuLowering:
    def __init__(self, limits: GpuLimits, choose: Choose) -> None:
        self.limits = limits
        self.choose = choose

    # ---- operators with weights

    def embedding(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        table = _weight(op["weight"], self.limits)
        func = embedding.embedding(table, op["scale"], self.limits)
        parts = _in_parts(lowering, args[1:], row_parts((table,), self.limits))
        args = self._readable(lowering, [args[0], *parts])
        return lowering.call(func, args, [((_shape(args[0])[0], table.k), "float32")])

    def linears(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        """A kernel for each weight: kernels of all would need more buffers than some devices
        bind."""
        x, rest = args[0], args[1:]
        outputs: list[relax.Expr] = []
        halves: Sequence[relax.Expr] = ()
        for description, bias in zip(op["weights"], op["biases"], strict=True):
            operator = LinearOperator((_weight(description, self.limits),), (bias,))
            operands, rest = _split(operator, rest)
            if not halves and can_use_matrices(operator, self.limits):
                halves = self._halves(lowering, x)
            outputs.append(lowering.emit(self._call(lowering, operator, [x, *operands], halves)))
        return outputs[0] if len(outputs) == 1 else relax.Tuple(outputs)

    def linear_add(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        operator = LinearOperator(
            (_weight(op["weight"], self.limits),), (op["bias"],), residual=True
        )
        return self._call(lowering, operator, args)

    def gated_mlp(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        weights = tuple(_weight(description, self.limits) for description in op["weights"])
        biases, activation = tuple(op["biases"]), op["activation"]
        if len({weight.format for weight in weights}) == 1:
            both = LinearOperator(weights, biases, activation=activation)
            return self._call(lowering, both, args)
        # A GGUF may have them in different types: then one after the other.
        gate = LinearOperator(weights[:1], biases[:1])
        up = LinearOperator(weights[1:], biases[1:], residual=True, activation=activation)
        operands, rest = _split(gate, args[1:])
        gated = lowering.emit(self._call(lowering, gate, [args[0], *operands]))
        return self._call(lowering, up, [args[0], *rest, gated])

    def _call(
        self, lowering: Lowering, operator: LinearOperator, args: Sequence[relax.Expr],
        halves: Sequence[relax.Expr] = (),
    ) -> relax.Expr:  # fmt: skip
        """`halves` of x, if they have been made."""
        output = ((_shape(args[0])[0], operator.n), "float32")
        if can_use_matrices(operator, self.limits):
            args = [args[0], *(halves or self._halves(lowering, args[0])), *args[1:]]
        if self.limits.max_buffers is not None and len(args) + 1 > self.limits.max_buffers:
            raise CompileError(
                f"kernel {operator.name} takes {len(args) + 1} tensors, the target allows "
                f"{self.limits.max_buffers}; choose a quantization with fewer parts, as q4f16_1"
            )
        args = self._readable(lowering, self._with_row_parts(lowering, operator, args))
        schedule = self.choose(operator, self.limits)
        func = linear(operator, self.limits, schedule)
        if size := workspace_size(operator, schedule.many):
            both = lowering.emit(lowering.call(func, args, [output, ((size,), "float32")]))
            return relax.TupleGetItem(both, 0)
        return lowering.call(func, args, [output])

    def _with_row_parts(
        self, lowering: Lowering, operator: LinearOperator, args: Sequence[relax.Expr]
    ) -> Sequence[relax.Expr]:
        """The weights' tensors in parts, where they are too large for a kernel."""
        rows = row_parts(operator.weights, self.limits)
        if len(rows) == 1:
            return args
        found, rest = [args[0]], args[1:]
        for weight, bias in zip(operator.weights, operator.biases, strict=True):
            count = len(weight.format.parts(1, 1))
            found += [*_in_parts(lowering, rest[:count], rows), *rest[count : count + bias]]
            rest = rest[count + bias :]
        return [*found, *rest]

    def _halves(self, lowering: Lowering, x: relax.Expr) -> Sequence[relax.Expr]:
        """What `half_rows` makes of x."""
        rows, k = _shape(x)
        outputs = [((rows, padded(int(k))), "float16"), ((rows,), "float32")]
        both = lowering.emit(lowering.call(half_rows(int(k), self.limits), [x], outputs))
        return [lowering.emit(relax.TupleGetItem(both, i)) for i in range(2)]

    def _readable(self, lowering: Lowering, args: Sequence[relax.Expr]) -> Sequence[relax.Expr]:
        """16-bit weights as words, where kernels cannot read them."""
        if self.limits.has_float16:
            return args
        return [self._as_words(lowering, arg) for arg in args]

    def _as_words(self, lowering: Lowering, arg: relax.Expr) -> relax.Expr:
        if str(arg.ty.dtype) not in HALVES:
            return arg
        shape = words_of([int(size) for size in _shape(arg)])
        view = relax.op.memory.view(lowering.argument(arg), shape, "uint32")
        return lowering.emit(view)

    # ---- operators without weights

    def rms_norm(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        constants = (op["size"], op["epsilon"], op["residual"])
        if self.limits.shares_memory:
            func = norm.rms_norm(*constants, self.limits)
        else:
            func = thread_rms_norm(*constants)
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
        output = (tuple(_shape(tensors[0])), "float32")
        if not self.limits.shares_memory:
            func = thread_attention(shape, op["scale"], op["window"], softcap=op.get("softcap"))
            return lowering.call(func, tensors, [output], scalars=[layer])
        func = attention.attention(shape, op["scale"], op["window"], self.limits)
        workspace = (attention.splits_shape(shape, self.limits), "float32")
        both = lowering.emit(lowering.call(func, tensors, [output, workspace], scalars=[layer]))
        return relax.TupleGetItem(both, 0)


def _split(
    operator: LinearOperator, args: Sequence[relax.Expr]
) -> tuple[Sequence[relax.Expr], Sequence[relax.Expr]]:
    """The operands of the first weight in args, and the rest."""
    count = len(operator.weights[0].format.parts(1, 1)) + operator.biases[0]
    return args[:count], args[count:]


def _in_parts(
    lowering: Lowering, tensors: Sequence[relax.Expr], parts: Sequence[range]
) -> Sequence[relax.Expr]:
    """A weight's tensors, those of the first rows first."""
    if len(parts) == 1:
        return tensors
    return [lowering.part(t, i, rows) for i, rows in enumerate(parts) for t in tensors]


def _constants(op: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in op.items() if name != "kind"}
