"""Replace a model's operators by a target's kernels, and its weights by packed ones.

before                                            after
    gv = call_tir(linears, (x, w.q_weight,            xq = call_tir(quantize_activations, (x,))
                  w.q_scale), out)                    gv = call_tir(linears_…, (*xq, w.packed), out)
    params: …, w.q_weight, w.q_scale                  params: …, w.packed

What replaces an operator is the target's choice: a table from the operator's kind (in the JSON of
its PrimFunc attribute `everycast.op`) to a function. For every packed weight the module gets a
function `pack_…` from the portable parts to the packed buffer, and the pass reports which
parameter comes from where, so that the engine can pack once and keep the result.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...artifact.dtypes import numpy_dtype
from ...artifact.tensor_parts import part_name

ATTRIBUTE = "everycast.op"
Shape = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the lowered functions, in call order.

    `sources` are tensors of the artifact. With `pack`, the function of that name makes the
    parameter from them; without, the parameter is its only source.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    pack: str | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(slots=True)
class LoweredModel:
    """Result of `lower_operators`. Each function takes its inputs, then all `parameters`."""

    module: tvm.IRModule
    parameters: list[Parameter]
    lowered: dict[str, int] = field(default_factory=dict)
    """How many calls of each operator kind were replaced."""
    schedules: dict[str, int] = field(default_factory=dict)
    """How many calls run by which kind of schedule; empty where the target does not say."""
    kernels: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    """The handlers' PrimFuncs, by their names in `module`."""
    row_parts: dict[str, list[int]] = field(default_factory=dict)
    """Tensors of the artifact that parameters are parts of (`artifact.tensor_parts`): the rows of
    each part."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What handlers tell whoever loads the library: entries of its metadata."""
    in_one_buffer: bool = False
    """Whether the functions take all parameters as one uint8 buffer (`artifact.packed_layout`)
    instead."""


Handler = Callable[["Lowering", Mapping[str, Any], Sequence[relax.Expr]], relax.Expr | None]


class Lowering:
    """What a handler may do: call PrimFuncs, and trade weight parts for a packed weight."""

    def __init__(self, pass_: "_LowerOperators") -> None:
        self._pass = pass_

    def call(
        self,
        func: tirx.PrimFunc,
        args: Sequence[relax.Expr],
        outputs: Sequence[tuple[Shape, str]],
        *,
        scalars: Sequence[relax.Expr] = (),
        inplace: Sequence[int] | None = None,
    ) -> relax.Expr:
        """Call `func` on `args` (then scalars, then outputs of the given shapes and dtypes)."""
        variable = self._pass.global_var(func)
        out_ty = [relax.TensorType(list(shape), dtype) for shape, dtype in outputs]
        all_args = relax.Tuple([*(self._pass.resolve(arg) for arg in args), *scalars])
        out = out_ty if len(out_ty) > 1 else out_ty[0]
        if inplace is not None:
            return relax.op.call_tir_inplace(variable, all_args, list(inplace), out)
        return relax.call_tir(variable, all_args, out)

    def emit(self, expr: relax.Expr) -> relax.Var:
        return self._pass.builder_.emit(expr)

    def argument(self, arg: relax.Expr) -> relax.Expr:
        """`arg` as the lowered function has it."""
        return self._pass.resolve(arg)

    def part(self, arg: relax.Expr, index: int, rows: range) -> relax.Var:
        """Rows of the parameter `arg`, the `index`-th of its parts, as a parameter."""
        return self._pass.part(arg, index, rows)

    def note(self, name: str, value: Any) -> None:
        """Add an entry to the library's metadata."""
        self._pass.notes[name] = value

    def packed(
        self, parts: Sequence[relax.Expr], num_bytes: int, key: str, pack: tirx.PrimFunc
    ) -> relax.Var:
        """The packed form of a weight whose portable parts are the parameters `parts`.

        `key` names the layout; the same parts with the same key are packed once.
        """
        return self._pass.packed(parts, num_bytes, key, pack)


@mutator
class _LowerOperators(PyExprMutator):
    def __init__(
        self, module: tvm.IRModule, names: Sequence[str], handlers: Mapping[str, Handler]
    ) -> None:
        super().__init__(module)
        self.module = module
        self.names = names
        self.plain: dict[str, str] = {}
        self.handlers = handlers
        self.lowering = Lowering(self)
        self.lowered: dict[str, int] = {}
        self.parameters: dict[str, Parameter] = {}
        self.packers: dict[str, tuple[tirx.PrimFunc, list[tuple[Shape, str]], int]] = {}
        self.variables: dict[str, relax.Var] = {}
        self.functions: dict[int, tuple[tirx.PrimFunc, relax.GlobalVar]] = {}
        self.row_parts: dict[str, list[int]] = {}
        self.notes: dict[str, Any] = {}

    def global_var(self, func: tirx.PrimFunc) -> relax.GlobalVar:
        """Add `func` once. Factories cache their PrimFuncs, so identity is enough."""
        known = self.functions.get(id(func))
        if known is None:
            hint = str(func.attrs["global_symbol"])
            variable = self.builder_.add_func(func.without_attr("global_symbol"), hint)
            known = self.functions[id(func)] = (func, variable)
        return known[1]

    def packed(
        self, parts: Sequence[relax.Expr], num_bytes: int, key: str, pack: tirx.PrimFunc
    ) -> relax.Var:
        sources = tuple(self.plain[part.name] for part in parts)
        name = f"{sources[0].rpartition('.')[0]}.packed"
        if name not in self.parameters:
            shapes = [(tuple(int(s) for s in p.ty.shape), str(p.ty.dtype)) for p in parts]
            self.packers.setdefault(f"pack_{key}", (pack, shapes, num_bytes))
            self.parameters[name] = Parameter(name, (num_bytes,), "uint8", sources, f"pack_{key}")
        return self.parameter_variable(name)

    def part(self, arg: relax.Expr, index: int, rows: range) -> relax.Var:
        whole = self.plain[arg.name]
        name = part_name(whole, index)
        if name not in self.parameters:
            shape = (len(rows), *(int(size) for size in list(arg.ty.shape)[1:]))
            self.parameters[name] = Parameter(name, shape, str(arg.ty.dtype), (name,))
            self.row_parts.setdefault(whole, []).append(len(rows))
        return self.parameter_variable(name)

    def parameter_variable(self, name: str) -> relax.Var:
        if name not in self.variables:
            p = self.parameters[name]
            self.variables[name] = relax.Var(name, relax.TensorType(p.shape, p.dtype))
        return self.variables[name]

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        if var.name in self.plain:
            name = self.plain[var.name]
            if name not in self.parameters:
                shape = tuple(int(s) for s in var.ty.shape)
                self.parameters[name] = Parameter(name, shape, str(var.ty.dtype), (name,))
            return self.parameter_variable(name)
        return super().visit_var_(var)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        description = self._describe(call)
        if description is None or description["kind"] not in self.handlers:
            return super().visit_call_(call)
        args = [a if self.is_parameter(a) else self.visit_expr(a) for a in call.args[1]]
        kind = description["kind"]
        replacement = self.handlers[kind](self.lowering, description, args)
        if replacement is None:
            return super().visit_call_(call)
        self.lowered[kind] = self.lowered.get(kind, 0) + 1
        return replacement

    def is_parameter(self, arg: relax.Expr) -> bool:
        return isinstance(arg, relax.Var) and arg.name in self.plain

    def resolve(self, arg: relax.Expr) -> relax.Expr:
        """A parameter that no handler packed is passed on as it is."""
        return self.visit_expr(arg) if self.is_parameter(arg) else arg

    def _describe(self, call: relax.Call) -> dict[str, Any] | None:
        if not call.args or not isinstance(call.args[0], relax.GlobalVar):
            return None
        func = self.module.functions.get(call.args[0])
        if not isinstance(func, tirx.PrimFunc) or ATTRIBUTE not in (func.attrs or {}):
            return None
        description: dict[str, Any] = json.loads(str(func.attrs[ATTRIBUTE]))
        return description

    def run(self) -> LoweredModel:
        bodies: list[tuple[relax.GlobalVar, relax.Function, relax.Expr, dict[str, relax.Var]]] = []
        for variable, func in self.module.functions.items():
            if not isinstance(func, relax.Function) or "num_input" not in (func.attrs or {}):
                continue
            num_input = int(func.attrs["num_input"])
            weights = list(func.params)[num_input:]
            self.plain = {p.name: name for p, name in zip(weights, self.names, strict=True)}
            self.variables = {}
            body = self.visit_expr(func.body)
            bodies.append((variable, func, body, self.variables))
        for variable, func, body, self.variables in bodies:
            inputs = list(func.params)[: int(func.attrs["num_input"])]
            weights = [self.parameter_variable(name) for name in self.parameters]
            lowered = relax.Function([*inputs, *weights], body, attrs=func.attrs)
            self.builder_.update_func(variable, lowered)
        for name, (pack, shapes, num_bytes) in self.packers.items():
            self._add_packer(name, pack, shapes, num_bytes)
        module = relax.transform.DeadCodeElimination()(self.builder_.get())
        kernels = {variable.name_hint: func for func, variable in self.functions.values()}
        return LoweredModel(
            module, list(self.parameters.values()), self.lowered, kernels=kernels,
            row_parts=self.row_parts, notes=self.notes,
        )  # fmt: skip

    def _add_packer(
        self, name: str, pack: tirx.PrimFunc, shapes: list[tuple[Shape, str]], num_bytes: int
    ) -> None:
        params = [relax.Var(f"part{i}", relax.TensorType(s, d)) for i, (s, d) in enumerate(shapes)]
        builder = relax.BlockBuilder()
        variable = self.global_var(pack)
        with builder.function(name, params):
            call = relax.call_tir(
                variable, relax.Tuple(params), relax.TensorType((num_bytes,), "uint8")
            )
            builder.emit_func_output(builder.emit(call))
        func = builder.get()[name]
        self.builder_.add_func(func.with_attr("global_symbol", name), name)


def lower_operators(
    module: tvm.IRModule, names: Sequence[str], handlers: Mapping[str, Handler]
) -> LoweredModel:
    """Replace every operator that `handlers` knows; see the top of the file.

    `names` are the model's parameters, in the order in which every function takes them.
    """
    return _LowerOperators(module, names, handlers).run()
