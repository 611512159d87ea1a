"""Vector idioms for emitting TIR with the IRBuilder (parsing TVMScript is far slower).

Vectors are 16 float32 wide on every instruction set: LLVM splits them into what the machine has.
"""

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .shared_loop import LINE_BYTES

LANES = 16
ON_THE_STACK = {"disable_lower_builtin": True}
"""Annotation of local buffers; see `local_array`."""


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


def local_array(size: int, dtype: str = "float32") -> Any:
    """`size` numbers of a thread's own, on the stack.

    TVM would take them from its heap, once for every block of rows, and then LLVM could not keep
    them in registers: the annotation says not to (`LowerTVMBuiltin`). TVM aligns numbers on the
    stack to 16 bytes, so that most vectors of 64 would lie in two lines of the cache, which cost
    4 % of a prompt; vectors are aligned by their size.
    """
    lanes = LINE_BYTES // np.dtype(dtype).itemsize
    if size % lanes:
        return B.alloc_buffer((size,), dtype, annotations=ON_THE_STACK)
    vectors = B.alloc_buffer((size // lanes,), f"{dtype}x{lanes}", annotations=ON_THE_STACK)
    numbers = tirx.decl_buffer((size,), dtype, "numbers", data=vectors.data)
    B.add_to_parent(tirx.DeclBuffer(numbers, data=vectors.data))
    return numbers


def opaque(value: Any) -> Any:
    """The same, an int64, bound so that TVM's arithmetic analysis does not look into it.

    It would for every address that is computed from it, and take most of the compile time.
    """
    cell = B.alloc_buffer((1,), "int64", annotations={"disable_lower_builtin": True})
    B.buffer_store(cell, value, [0])
    return B.Bind(cell[0])


def fma(a: Any, b: Any, c: Any, width: int = 1) -> Any:
    """a · b + c, rounded once, of float32 vectors."""
    return T.call_llvm_pure_intrin(dtype_of("float32", width), "llvm.fma", a, b, c)


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
