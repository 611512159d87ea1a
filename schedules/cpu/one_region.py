"""Turn a function's kernel calls into one parallel region.

before                                    after
    a = call_tir(kernel_1, (x, w))            out, workspace = call_tir(region, (x, w, v))
    b = call_tir(kernel_2, (a, v))
    out = call_tir(kernel_3, (b,))

`region` starts every thread once; each calls the kernels' subroutines (see `kernel.py`) one after
another, and waits where one reads or overwrites what others wrote (see `shared_loop.py`). What used
to be a tensor between two kernels is a place in the workspace, shared by values that are not alive
together. Waking threads for every kernel, and the virtual machine's calls, cost 10 to 20 % of a
decoding step.

The weights come as one buffer, with each at a known offset: TVM checks every tensor argument of a
function at every call, and the checks of some hundred weights take longer to compile than the
kernels.

The number of threads is that of TVM's pool when the function is called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from ...artifact.dtypes import numpy_dtype
from ...artifact.packed_layout import packed_offsets
from ..passes.lower_operators import LoweredModel
from .kernel import Subroutine, body, kernel, subroutine
from .shared_loop import LINE_BYTES, MAX_THREADS, emit_wait, llvm_source

_ALIGNMENT = 64


@dataclass(eq=False, slots=True)
class Value:
    """A tensor in the region: an argument, a result, or a place in the workspace."""

    shape: tuple[Any, ...]
    dtype: str
    argument: relax.Var | None = None
    is_result: bool = False
    last_epoch: int = -1
    """When it is last used; epochs are separated by waiting for all steps of the one before."""
    offset: int = 0
    """Of a weight: first byte in the buffer of weights. Of a temporary: its place among those of
    the same unit, in bytes for one unit."""

    @property
    def is_temporary(self) -> bool:
        return self.argument is None and not self.is_result

    def unit(self) -> tuple[Any, int]:
        """The symbolic size that its bytes are a multiple of (None: they are a constant), and the
        bytes for one, rounded up so that places stay aligned."""
        size, count = None, numpy_dtype(self.dtype).itemsize
        for extent in self.shape:
            if isinstance(extent, tirx.IntImm):
                count *= int(extent)
                continue
            factor = 1
            if isinstance(extent, tirx.Mul) and isinstance(extent.b, tirx.IntImm):
                extent, factor = extent.a, int(extent.b)
            if size is not None or not isinstance(extent, tirx.Var):
                raise ValueError(f"shape {self.shape} is not a multiple of one symbolic size")
            size, count = extent, count * factor
        return size, -(-count // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class View:
    """A value under a shape, its own or another."""

    value: Value
    shape: tuple[Any, ...]


@dataclass(slots=True)
class Step:
    """One call: its subroutine, the tensors it takes, in order, and what it writes of them."""

    name: str
    part: Subroutine
    tensors: list[View]
    scalars: list[Any]
    writes: set[Value]
    epoch: int = 0


def one_region(lowered: LoweredModel, *, is_arm: bool) -> LoweredModel:
    """`lowered` with the body of every model function replaced by a single call; the packers stay
    as they are."""
    module = tvm.IRModule(dict(lowered.module.functions.items()), attrs=lowered.module.attrs)
    offsets, num_bytes = packed_offsets([p.num_bytes for p in lowered.parameters])
    for variable, func in lowered.module.functions.items():
        if isinstance(func, relax.Function) and "num_input" in (func.attrs or {}):
            weights = relax.Var("weights", relax.TensorType([num_bytes], "uint8"))
            region = _Region(func, lowered.kernels, weights, offsets)
            _rewrite(module, variable, region, is_arm)
    return replace(lowered, module=module, in_one_buffer=True)


def _rewrite(
    module: tvm.IRModule, variable: relax.GlobalVar, region: "_Region", is_arm: bool
) -> None:
    names = {known.name_hint: known for known in module.functions}
    for step in region.steps:
        if step.name not in names:
            names[step.name] = tvm.ir.GlobalVar(step.name)
            module[names[step.name]] = step.part.func
    func, workspace = region.func, _Workspace(region.steps)
    builder = relax.BlockBuilder()
    name = f"{variable.name_hint}_region"
    driver = builder.add_func(_emit(name, region, workspace, names, is_arm), name)
    module[driver] = builder.get()[driver.name_hint]
    made = [value for value in region.results if value.argument is None]
    out_ty = [relax.TensorType(list(value.shape), value.dtype) for value in made]
    out_ty.append(relax.TensorType([workspace.num_bytes], "uint8"))
    params, attrs = [*region.inputs, region.weights], dict(func.attrs.items())
    with builder.function(variable.name_hint, params, attrs=attrs):
        with builder.dataflow():
            call = builder.emit(relax.call_tir(driver, relax.Tuple(params), out_ty))
            outputs = [
                relax.TupleGetItem(call, made.index(value))
                if value.argument is None
                else value.argument
                for value in region.results
            ]
            result = builder.emit_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
        builder.emit_func_output(result)
    module[variable] = builder.get()[variable.name_hint]


class _Region:
    """A function's body as steps over values."""

    def __init__(
        self, func: relax.Function, kernels: Mapping[str, tirx.PrimFunc], weights: relax.Var,
        offsets: Sequence[int],
    ) -> None:  # fmt: skip
        self.func, self.kernels, self.weights = func, kernels, weights
        num_input = int(func.attrs["num_input"])
        self.inputs = list(func.params)[:num_input]
        self.steps: list[Step] = []
        self._views: dict[relax.Var, Any] = {}
        for parameter in func.params:
            value = Value(tuple(parameter.ty.shape), str(parameter.ty.dtype), parameter)
            self._views[parameter] = View(value, value.shape)
        for parameter, offset in zip(list(func.params)[num_input:], offsets, strict=True):
            value = self._views[parameter].value
            value.argument, value.offset = weights, offset
        for block in func.body.blocks:
            for binding in block.bindings:
                self._views[binding.var] = self._read(binding.value)
        returned = self._read(func.body.body)
        views = returned if isinstance(returned, list) else [returned]
        self.results: list[Value] = [view.value for view in views]
        for value in self.results:
            value.is_result = value.argument is None
        self._number_epochs()

    def _read(self, expr: relax.Expr) -> Any:
        """The view that an expression stands for, or a list of them for a tuple."""
        if isinstance(expr, relax.Var):
            return self._views[expr]
        if isinstance(expr, relax.TupleGetItem):
            return self._read(expr.tuple_value)[expr.index]
        if isinstance(expr, relax.Tuple):
            return [self._read(item) for item in expr.fields]
        name = str(expr.op.name)
        if name == "relax.reshape":
            return View(self._read(expr.args[0]).value, tuple(expr.args[1].values))
        if name in ("relax.call_tir", "relax.call_tir_inplace"):
            return self._add_step(expr)
        raise ValueError(f"{name} cannot be a part of a parallel region")

    def _add_step(self, call: relax.Call) -> Any:
        items = list(call.args[1].fields)
        inputs = [self._read(item) for item in items if isinstance(item.ty, relax.TensorType)]
        scalars = [item for item in items if not isinstance(item.ty, relax.TensorType)]
        out_types = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
        inplace = [-1] * len(out_types)
        if call.op.name == "relax.call_tir_inplace":
            inplace = [int(index) for index in call.attrs.inplace_indices]
        outputs, made = [], []
        for index, ty in zip(inplace, out_types, strict=True):
            if index < 0:
                value = Value(tuple(ty.shape), str(ty.dtype))
                made.append(View(value, value.shape))
            outputs.append(inputs[index] if index >= 0 else made[-1])
        name = call.args[0].name_hint
        part = subroutine(self.kernels[name])
        writes = {view.value for view in outputs}
        self.steps.append(Step(f"{name}_part", part, [*inputs, *made], scalars, writes))
        return outputs if len(outputs) > 1 else outputs[0]

    def _number_epochs(self) -> None:
        """A new epoch begins with a step that reads what was written in the last one, or writes
        what was read or written in it."""
        epoch = 0
        used: set[Value] = set()
        written: set[Value] = set()
        for step in self.steps:
            values = {view.value for view in step.tensors}
            if values & written or step.writes & used:
                epoch += 1
                used, written = set(), set()
            step.epoch = epoch
            used |= values
            written |= step.writes
            for value in values:
                value.last_epoch = epoch


class _Workspace:
    """The threads' shares, the counters of every step's loop, and a place for each temporary.
    `num_bytes` is an expression of the symbolic sizes.

    Places are shared by values that are not used in the same epoch or over it.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        ends: dict[Any, int] = {}
        alive: dict[Any, list[Value]] = {}
        placed: set[Value] = set()
        for step in steps:
            for view in step.tensors:
                value = view.value
                if not value.is_temporary or value in placed:
                    continue
                placed.add(value)
                size, num_bytes = value.unit()
                alive[size] = [v for v in alive.get(size, []) if v.last_epoch >= step.epoch]
                value.offset = _first_gap(alive[size], num_bytes)
                alive[size].append(value)
                ends[size] = max(ends.get(size, 0), value.offset + num_bytes)
        self._starts: dict[Any, Any] = {}
        self.num_lines = MAX_THREADS + len(steps)
        total: Any = T.int64(self.num_lines * LINE_BYTES)
        for size, end in ends.items():
            self._starts[size] = total
            total = total + (1 if size is None else size) * end
        self.num_bytes = total

    def place(self, value: Value) -> Any:
        """Where the value starts, in bytes."""
        size, _ = value.unit()
        return self._starts[size] + (1 if size is None else size) * value.offset


def _first_gap(neighbours: Sequence[Value], num_bytes: int) -> int:
    """The lowest offset at which `num_bytes` overlap none of the neighbours."""
    offset = 0
    for other in sorted(neighbours, key=lambda value: value.offset):
        if offset + num_bytes <= other.offset:
            break
        offset = max(offset, other.offset + other.unit()[1])
    return offset


def _emit(
    name: str, region: _Region, workspace: _Workspace, parts: Mapping[str, relax.GlobalVar],
    is_arm: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """(inputs, weights, results that no input is, workspace) → nothing: the region."""
    with kernel(name) as (k, ib):
        inputs = {
            parameter: k.buffer(parameter.name, tuple(parameter.ty.shape), parameter.ty.dtype)
            for parameter in region.inputs
        }
        weights = k.buffer("weights", tuple(region.weights.ty.shape), "uint8")
        results = {
            value: k.buffer(f"result{i}", value.shape, value.dtype)
            for i, value in enumerate(region.results)
            if value.argument is None
        }
        memory = k.buffer("workspace", (workspace.num_bytes,), "uint8")

        def address(value: Value) -> Any:
            if value.is_temporary:
                return T.address_of(memory[workspace.place(value)])
            if value.is_result:
                return results[value].data
            if value.argument is region.weights:
                return T.address_of(weights[value.offset])
            return inputs[value.argument].data

        with body():
            num_threads = B.Bind(T.Cast("int64", _pool_size()))
            with B.serial(workspace.num_lines) as i:
                zeros = T.broadcast(T.uint8(0), LINE_BYTES)
                B.buffer_store(memory, zeros, [T.ramp(i * LINE_BYTES, 1, LINE_BYTES)])
            shares = T.address_of(memory[0])
            with (
                B.attr(T.int32(0), "pragma_import_llvm", llvm_source(is_arm)),
                B.parallel(num_threads) as thread,
            ):
                running: list[Any] = []
                for number, step in enumerate(region.steps):
                    if number and step.epoch != region.steps[number - 1].epoch:
                        for done in running:
                            emit_wait(done)
                        running = []
                    done = T.address_of(memory[(MAX_THREADS + number) * LINE_BYTES])
                    running.append(done)
                    team = [done, shares, T.int64(number + 1), thread, num_threads]
                    call = [*team, *_call_arguments(step, address)]
                    B.evaluate(tvm.ir.Call(parts[step.name], call))
    return ib.get()


def _pool_size() -> Any:
    """Threads of the calling thread's pool, int32."""
    return T.call_intrin("int32", "tirx.tvm_call_packed", "runtime.NumThreads")


def _call_arguments(step: Step, address: Any) -> list[Any]:
    """What the subroutine takes: sizes by their names in the tensors' shapes, then in order."""
    tensors, scalars = iter(step.tensors), iter(step.scalars)
    sizes: dict[str, Any] = {}
    given = iter(step.tensors)
    for argument in step.part.arguments:
        if argument.shape is None:
            continue
        for extent, actual in zip(argument.shape, next(given).shape, strict=True):
            if isinstance(extent, str):
                sizes[extent] = actual
    values = []
    for argument in step.part.arguments:
        if argument.shape is not None:
            values.append(address(next(tensors).value))
        else:
            values.append(sizes[argument.name] if argument.name in sizes else next(scalars))
    return values
