"""A device function of TIR as a GLSL compute shader.

    layout(push_constant) uniform Scalars { layout(offset = 0) int n; } scalars;
    layout(std430, binding = 0) readonly buffer B0_vec4 { vec4 b0_vec4[]; };
    shared float partial_1[64];
    void main() { … }

A work group of the device is a block of TIR, an invocation one of its threads. The same function is
written twice: how arrays are declared depends on all uses of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tvm import ir, sym

from .access import places
from .expressions import Expressions
from .glsl_types import DType, convert, glsl_name
from .memory import Array
from .writer import Writer

PUSH_CONSTANT_BYTES = 128
"""What every device grants; more scalars go into a uniform buffer, bound after the others."""

_EXTENSIONS = (
    "GL_EXT_control_flow_attributes",
    "GL_EXT_shader_16bit_storage",
    "GL_EXT_shader_8bit_storage",
    "GL_EXT_shader_explicit_arithmetic_types",
)
_UNROLLED = 3
_HARMLESS_ATTRIBUTES = ("pragma_", "storage_alignment", "hint_", "buffer_bind_scope")
_IDS = {"blockIdx": "gl_WorkGroupID", "threadIdx": "gl_LocalInvocationID"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel, in order.

    `kind` is `buffer` or the dtype that the host passes. `access` says what a kernel does with a
    buffer: any of r and w. `offset` is where a scalar lies in the scalars' block, as `stored`.
    """

    kind: str
    access: str = ""
    offset: int = 0
    stored: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A shader, and what the runtime must know to launch it.

    `launch` names the sizes that follow the arguments, such as `blockIdx.x`. `num_threads` and
    `shared_bytes` are those of a work group. `subgroup_width` is 0 if it does not use subgroups,
    else a number that divides the size of the device's.
    """

    name: str
    source: str
    arguments: list[Argument]
    launch: list[str]
    scalar_bytes: int
    num_threads: int
    shared_bytes: int
    subgroup_width: int


def write_kernel(name: str, function: Any) -> Kernel:
    """The shader of a device function. Raises CompileError, naming the kernel and the construct,
    for what has no form in GLSL."""
    probe = _KernelWriter(name, function, [])
    probe.run()
    widths = [array.common_width() for array in probe.allocated]
    return _KernelWriter(name, function, widths).run()


class _KernelWriter:
    """Writes the statements of one kernel, once. `widths` are those of the shared and local arrays,
    in the order of their allocation; 1 where it ends."""

    def __init__(self, name: str, function: Any, widths: Sequence[int]) -> None:
        self.function = function
        self.widths = widths
        self.writer = Writer(name)
        self.code = Expressions(self.writer)
        self.buffers: list[Array] = []
        self.allocated: list[Array] = []
        self.local_size = {"x": 1, "y": 1, "z": 1}

    def run(self) -> Kernel:
        arguments, scalars = self._parameters()
        self.statement(self.function.body)
        scalar_bytes = max(
            (a.offset + DType(a.stored).bits // 8 for a in arguments if a.kind != "buffer"),
            default=0,
        )
        index = iter(self.buffers)
        arguments = [
            Argument("buffer", _access(next(index))) if a.kind == "buffer" else a for a in arguments
        ]
        return Kernel(
            self.writer.kernel,
            self._shader(scalars, scalar_bytes),
            arguments,
            [str(tag) for tag in self.function.attrs["tirx.kernel_launch_params"]],
            scalar_bytes,
            math.prod(self.local_size.values()),
            sum(array.num_bytes for array in self.allocated if array.place == "shared"),
            self.code.subgroup_width,
        )

    def _parameters(self) -> tuple[list[Argument], list[str]]:
        """Arguments, and the members of the scalars' block."""
        arguments, members, end = [], [], 0
        for parameter in self.function.params:
            if type(parameter.ty).__name__ == "PointerType":
                element = DType.parse(str(parameter.ty.element_type.dtype))
                if element is None:
                    self.writer.fail(f"argument {parameter.name} has an unknown type of elements")
                index = len(self.buffers)
                scalar = "uint8" if element.is_bool else element.scalar
                array = Array(f"b{index}", scalar, "buffer", binding=index)
                self.buffers.append(array)
                self.code.arrays[parameter] = array
                arguments.append(Argument("buffer"))
                continue
            dtype = self.code.dtype(parameter)
            # Sizes have 64 bits on the host; the runtime refuses what does not fit in 32.
            stored = {"int64": "int32", "float16": "float32"}.get(dtype.scalar, dtype.scalar)
            if dtype.is_bool or dtype.is_small_int:
                stored = "int32"
            size = DType(stored).bits // 8
            offset = -(-end // size) * size
            end = offset + size
            member = self.writer.fresh(parameter.name)
            members.append(f"layout(offset = {offset}) {glsl_name(stored)} {member};")
            arguments.append(Argument(dtype.scalar, offset=offset, stored=stored))
            text = f"scalars.{member}"
            if dtype.scalar == "int64":
                self.code.narrow.add(parameter)
                bound = sym.ConstIntBound(-(1 << 31), (1 << 31) - 1)
                self.code.analyzer.update(parameter, bound)
                self.code.values[parameter] = [text]
            else:
                self.code.values[parameter] = [convert(text, stored, dtype.scalar, 1)]
        return arguments, members

    def _shader(self, scalars: list[str], scalar_bytes: int) -> str:
        size = ", ".join(f"local_size_{axis} = {n}" for axis, n in self.local_size.items())
        lines = ["#version 460"]
        lines += [
            f"#extension {name} : require"
            for name in (*_EXTENSIONS, *sorted(self.writer.extensions))
        ]
        lines.append(f"layout({size}) in;")
        if scalars:
            place = "push_constant"
            if scalar_bytes > PUSH_CONSTANT_BYTES:
                place = f"std140, set = 0, binding = {len(self.buffers)}"
            lines.append(f"layout({place}) uniform Scalars {{ {' '.join(scalars)} }} scalars;")
        shared = [array for array in self.allocated if array.place == "shared"]
        for array in (*self.buffers, *shared):
            lines += array.declarations()
        lines += self.writer.helpers.values()
        return "\n".join([*lines, "void main() {", *self.writer.lines, "}", ""])

    def statement(self, s: Any) -> None:
        kind = type(s).__name__
        handler = getattr(self, f"_{kind}", None)
        if handler is None:
            self.writer.fail(f"it has a statement {kind}")
        handler(s)

    def _SeqStmt(self, s: Any) -> None:
        for part in s.seq:
            self.statement(part)

    def _Bind(self, s: Any) -> None:
        if type(s.var.ty).__name__ == "PointerType":
            self.code.arrays[s.var] = self._array_of(s.value)
        else:
            self.code.bind(s.var, s.value)

    def _Evaluate(self, s: Any) -> None:
        if type(s.value).__name__ == "Call":
            for piece in self.code.value(s.value):
                self.writer.emit(f"{piece};")

    def _AttrStmt(self, s: Any) -> None:
        if s.attr_key == "thread_extent":
            self._thread(s.node, s.value)
        elif not str(s.attr_key).startswith(_HARMLESS_ATTRIBUTES):
            self.writer.fail(f"it has the attribute {s.attr_key}")
        self.statement(s.body)

    def _thread(self, axis: Any, extent: Any) -> None:
        kind, _, letter = str(axis.thread_tag).partition(".")
        if kind not in _IDS or letter not in self.local_size:
            self.writer.fail(f"a loop is bound to {axis.thread_tag}")
        if kind == "threadIdx":
            if type(extent).__name__ != "IntImm":
                self.writer.fail(f"{axis.thread_tag} has no constant extent")
            self.local_size[letter] = int(extent.value)
        variable = axis.var
        dtype = self.code.dtype(variable)
        if dtype.scalar == "int64":
            self.code.narrow.add(variable)
            self.code.analyzer.update(variable, sym.ConstIntBound(0, (1 << 31) - 1))
        if type(extent).__name__ == "IntImm":
            self.code.analyzer.bind(variable, ir.Range(0, extent))
        self.code.values[variable] = [f"int({_IDS[kind]}.{letter})"]

    def _AllocBuffer(self, s: Any) -> None:
        buffer, scope = s.buffer, str(s.buffer.scope())
        element = DType.parse(str(buffer.dtype))
        if element is None:
            self.writer.fail(f"buffer {buffer.name} has elements of type {buffer.dtype}")
        length = element.lanes
        for extent in buffer.shape:
            if type(extent).__name__ != "IntImm":
                self.writer.fail(f"buffer {buffer.name} has no constant size")
            length *= int(extent.value)
        if scope not in ("local", "shared", "shared.dyn"):
            self.writer.fail(f"buffer {buffer.name} is in {scope} memory")
        place: Literal["local", "shared"] = "local" if scope == "local" else "shared"
        array = Array(self.writer.fresh(buffer.name), element.scalar, place, length)
        if len(self.allocated) < len(self.widths):
            array.width = self.widths[len(self.allocated)]
        if place == "local":
            self.writer.emit(array.declarator() + ";")
        self.allocated.append(array)
        self.code.arrays[buffer] = array

    def _DeclBuffer(self, s: Any) -> None:
        offset = s.buffer.ty.elem_offset if hasattr(s.buffer.ty, "elem_offset") else 0
        if offset is not None and not self.code.analyzer.can_prove_equal(offset, 0):
            self.writer.fail(f"buffer {s.buffer.name} starts inside another")
        self.code.arrays[s.buffer] = self._array_of(s.data)

    def _array_of(self, pointer: Any) -> Array:
        while type(pointer).__name__ == "Call" and pointer.args:
            if str(pointer.op.name) not in ("tirx.buffer_data", "tirx.reinterpret"):
                self.writer.fail(f"it takes a pointer from {pointer.op.name}")
            pointer = pointer.args[0]
        array = self.code.arrays.get(pointer)
        if array is None:
            self.writer.fail(f"a pointer comes from {pointer}")
        return array

    def _BufferStore(self, s: Any) -> None:
        dtype, buffer = self.code.dtype(s.value), s.buffer
        pieces = self.code.value(s.value)
        array = self.code.arrays.get(buffer)
        if array is not None and dtype.is_bool and array.place == "buffer":
            pieces = [
                convert(p, "bool", "uint8", w) for w, p in zip(dtype.widths, pieces, strict=True)
            ]
            dtype = dtype.with_scalar("uint8")
        # A value of several parts is complete before the first of them is stored.
        if len(pieces) > 1:
            pieces = [
                self.writer.temporary(dtype.scalar, width, piece)
                for width, piece in zip(dtype.widths, pieces, strict=True)
            ]
        elements, is_whole = places(self.code, buffer, s.indices, dtype.lanes)
        self.code.arrays[buffer].is_stored = True
        for element, piece in zip(
            elements, pieces if is_whole else self.writer.lanes(dtype, pieces), strict=True
        ):
            self.writer.emit(f"{element} = {piece};")

    def _For(self, s: Any) -> None:
        if s.step is not None and not self.code.analyzer.can_prove_equal(s.step, 1):
            self.writer.fail(f"loop {s.loop_var.name} does not go by ones")
        variable, name = s.loop_var, self.writer.fresh(s.loop_var.name)
        is_narrow = self.code.dtype(variable).scalar == "int64" and self.code.fits(s.min + s.extent)
        if is_narrow:
            self.code.narrow.add(variable)
        text = self.code.index if is_narrow else self.code.scalar
        scalar = "int32" if is_narrow else self.code.dtype(variable).scalar
        first = text(s.min)
        end = self.writer.temporary(scalar, 1, text(self.code.analyzer.simplify(s.min + s.extent)))
        self.code.analyzer.bind(variable, ir.Range(s.min, s.min + s.extent))
        self.code.values[variable] = [name]
        head = f"for ({glsl_name(scalar)} {name} = {first}; {name} < {end}; ++{name})"
        with self.writer.block(("[[unroll]] " if int(s.kind) == _UNROLLED else "") + head):
            self.statement(s.body)

    def _While(self, s: Any) -> None:
        with self.writer.block("while (true)"):
            self.writer.emit(f"if (!({self.code.scalar(s.condition)})) break;")
            self.statement(s.body)

    def _IfThenElse(self, s: Any) -> None:
        with self.writer.block(f"if ({self.code.scalar(s.condition)})"):
            self.statement(s.then_case)
        if s.else_case is not None:
            with self.writer.block("else"):
                self.statement(s.else_case)

    def _Break(self, _: Any) -> None:
        self.writer.emit("break;")

    def _Continue(self, _: Any) -> None:
        self.writer.emit("continue;")

    def _Return(self, _: Any) -> None:
        self.writer.emit("return;")

    def _AssertStmt(self, _: Any) -> None:
        """A device has nobody to tell."""


def _access(array: Array) -> str:
    return "r" * array.is_loaded + "w" * array.is_stored
