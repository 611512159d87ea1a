"""Vector idioms for emitting TIR with the IRBuilder (parsing TVMScript is far slower).

Vectors are 16 float32 wide on every instruction set: LLVM splits them into what the machine has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as B

LANES = 16


def vector_width(size: int) -> int:
    """The widest vector, at most 16, that divides `size`."""
    width = LANES
    while size % width:
        width //= 2
    return width


def ramp(start: Any, width: int = LANES, stride: int = 1) -> Any:
    return T.ramp(start, stride, width) if width > 1 else start


def splat(value: Any, width: int = LANES) -> Any:
    return T.broadcast(value, width) if width > 1 else value


def constant(value: float, width: int = LANES) -> Any:
    return splat(T.float32(value), width)


def dtype_of(name: str, width: int = LANES) -> str:
    return f"{name}x{width}" if width > 1 else name


def to_float(value: Any, width: int = LANES) -> Any:
    return T.Cast(dtype_of("float32", width), value)


def local_array(size: int) -> Any:
    """`size` float32 of a thread's own, on the stack.

    TVM would take them from its heap, once for every block of rows, and then LLVM could not keep
    them in registers: the annotation says not to (`LowerTVMBuiltin`).
    """
    return B.alloc_buffer((size,), "float32", annotations={"disable_lower_builtin": True})


def reduce_sum(vector: Any) -> Any:
    """Sum over the lanes of a 16-wide vector bound to a variable, pairwise."""
    return _reduce(vector, lambda a, b: a + b)


def reduce_max(vector: Any) -> Any:
    return _reduce(vector, T.max)


def _reduce(vector: Any, combine: Any) -> Any:
    scratch = local_array(LANES)
    width = LANES
    B.buffer_store(scratch, vector, [ramp(0)])
    while width > 1:
        width //= 2
        low, high = scratch[ramp(0, width)], scratch[ramp(width, width)]
        B.buffer_store(scratch, combine(low, high), [ramp(0, width)])
    return B.Bind(scratch[0])


def exp2(x: Any) -> Any:
    """2^x for x ≤ 127, relative error below 2e-7; x under -126 gives 0.

    Integer part into the exponent bits; 2^fraction by a minimax polynomial of degree 5, fitted
    for relative error on [0, 1] with p(0) = 1.
    """
    x = B.Bind(T.max(x, constant(-127.0)))  # an exponent field of 0
    whole = B.Bind(T.floor(x))
    fraction = B.Bind(x - whole)
    p = constant(1.86713118e-3)
    for c in (9.01702723e-3, 5.57999162e-2, 2.40164449e-1, 6.93151312e-1, 1.0):
        p = p * fraction + constant(c)
    bits = T.Cast("int32x16", whole) + splat(T.int32(127))
    return B.Bind(p * T.reinterpret("float32x16", T.shift_left(bits, splat(T.int32(23)))))


class Kernel:
    """A PrimFunc under construction: declares its arguments, then its body."""

    def __init__(self) -> None:
        self.sizes: dict[str, tirx.Var] = {}

    def size(self, name: str) -> tirx.Var:
        """A symbolic int64 size, the same variable for the same name."""
        return self.sizes.setdefault(name, tirx.Var(name, "int64"))

    def buffer(self, name: str, shape: tuple[Any, ...], dtype: str) -> Any:
        """An argument; strings in `shape` are symbolic sizes."""
        extents = [self.size(s) if isinstance(s, str) else s for s in shape]
        handle = B.arg(name, B.handle())
        return B.match_buffer(handle, extents, dtype)

    def scalar(self, name: str, dtype: str = "int64") -> Any:
        return B.arg(name, getattr(B, dtype)())


@contextmanager
def body() -> Iterator[None]:
    """The single opaque block that Relax's memory passes expect."""
    with B.sblock("root"):
        B.reads()
        B.writes()
        yield


@contextmanager
def kernel(name: str) -> Iterator[tuple[Kernel, IRBuilder]]:
    """Build a PrimFunc: `with kernel("name") as (k, ib): …` then `ib.get()`."""
    with IRBuilder() as ib:
        with B.prim_func(s_tir=True):
            B.func_name(name)
            B.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8})
            yield Kernel(), ib
