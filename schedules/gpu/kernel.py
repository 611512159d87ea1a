"""Kernels under construction: PrimFuncs that launch blocks of threads.

A PrimFunc may launch several kernels, and choose between them on the host (`either`). Sizes are
int32, so that indices are, except those of tensors that may hold more than 2^31 elements.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, cast

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as B

P = ParamSpec("P")


@dataclass(slots=True)
class Kernel:
    """A PrimFunc under construction: declares its arguments, then its body."""

    sizes: dict[str, Any] = field(default_factory=dict)

    def size(self, name: str, dtype: str = "int32") -> Any:
        """A symbolic size, the same variable for the same name."""
        if name not in self.sizes:
            self.sizes[name] = tirx.Var(name, dtype)
        return self.sizes[name]

    def buffer(
        self, name: str, shape: Sequence[Any], dtype: str, *, size_dtype: str = "int32"
    ) -> Any:
        """A tensor argument; strings in `shape` are symbolic sizes."""
        extents = [self.size(s, size_dtype) if isinstance(s, str) else s for s in shape]
        return B.match_buffer(B.arg(name, B.handle()), extents, dtype)

    def scalar(self, name: str, dtype: str = "int64") -> Any:
        return B.arg(name, getattr(B, dtype)())


@contextmanager
def kernel(name: str) -> Iterator[tuple[Kernel, IRBuilder]]:
    """Build a PrimFunc: `with kernel("name") as (k, ib): …` then `ib.get()`."""
    with IRBuilder() as ib:
        with B.prim_func(s_tir=True):
            B.func_name(name)
            B.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8})
            yield Kernel(), ib


@contextmanager
def body() -> Iterator[None]:
    """The single opaque block that Relax's memory passes expect; host code between launches."""
    with B.sblock("root"):
        B.reads()
        B.writes()
        yield


@contextmanager
def launch(blocks: Sequence[Any], threads: Sequence[int]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Launch a kernel of up to three dimensions: ([block index …], [thread index …]), x first."""
    with _bind("blockIdx", blocks) as block, _bind("threadIdx", threads) as thread:
        yield block, thread


@contextmanager
def _bind(kind: str, extents: Sequence[Any], axis: int = 0) -> Iterator[list[Any]]:
    if axis == len(extents):
        yield []
        return
    with B.launch_thread(f"{kind}.{'xyz'[axis]}", extents[axis]) as index:
        with _bind(kind, extents, axis + 1) as rest:
            yield [index, *rest]


def kernel_factory(emit: Callable[P, tirx.PrimFunc]) -> Callable[P, tirx.PrimFunc]:
    """Decorates a function that emits a kernel: the same arguments give the same PrimFunc."""
    return cast(Callable[P, tirx.PrimFunc], functools.cache(emit))


@contextmanager
def when(condition: Any) -> Iterator[None]:
    with B.If(condition), B.Then():
        yield


def either(condition: Any, yes: Callable[[], None], no: Callable[[], None]) -> None:
    """Emit both branches; outside a launch the host chooses."""
    with B.If(condition):
        with B.Then():
            yes()
        with B.Else():
            no()


@contextmanager
def elements(count: Any, threads: int) -> Iterator[Any]:
    """Launch a thread for each of `count` elements: the thread's index."""
    with launch([ceil_div(count, threads)], [threads]) as ((block,), (thread,)):
        index = bind(block * threads + thread)
        with when(index < count):
            yield index


def registers(size: int, dtype: str = "float32") -> Any:
    """`size` values of each thread's own."""
    return B.alloc_buffer((size,), dtype, scope="local")


def shared(size: int, dtype: str = "float32") -> Any:
    """`size` values of a block of threads."""
    return B.alloc_buffer((size,), dtype, scope="shared")


def barrier() -> None:
    """All threads of the block wait for each other, and see what each has written."""
    B.evaluate(T.tvm_storage_sync("shared"))


def store(buffer: Any, value: Any, *indices: Any) -> None:
    B.buffer_store(buffer, value, list(indices))


def load_vector(buffer: Any, rows: Sequence[Any], first: Any, count: int) -> list[Any]:
    """buffer[*rows, first …] as `count` scalars, read four or two at a time where `count` is a
    multiple of that; `first` then is one as well."""
    width = vector_width(count)
    if width == 1:
        return [bind(buffer[(*rows, first + i)]) for i in range(count)]
    values = []
    for start in range(0, count, width):
        vector = bind(buffer[(*rows, T.ramp(first + start, 1, width))])
        values += [bind(T.Shuffle([vector], [lane])) for lane in range(width)]
    return values


def store_vector(buffer: Any, values: Sequence[Any], first: Any) -> None:
    """buffer[first …] = values, a flat array, by the widths of `load_vector`."""
    width = vector_width(len(values))
    for start in range(0, len(values), width):
        part = values[start : start + width]
        if width == 1:
            store(buffer, part[0], first + start)
        else:
            vector = T.Shuffle(list(part), list(range(width)))
            store(buffer, vector, T.ramp(first + start, 1, width))


def vector_width(count: int) -> int:
    """The widest vector, of at most 4, that `count` is a multiple of."""
    return math.gcd(count, 4)


def bind(value: Any) -> Any:
    return B.Bind(value)


def settled(value: Any) -> Any:
    """The same, computed here and once.

    A value that is only bound is written out again wherever it is used, by TVM's simplification:
    chains of such values would grow without end. What was stored and loaded is not looked into.
    """
    dtype = str(value.ty.dtype)
    cell = registers(1, dtype)
    store(cell, value, 0)
    return bind(cell[0])


def minus_infinity() -> Any:
    """By its bits: not every GPU's language has a word for it."""
    return T.reinterpret("float32", T.uint32(0xFF800000))


def not_a_number() -> Any:
    return T.reinterpret("float32", T.uint32(0x7FC00000))


def ceil_div(value: Any, divisor: int) -> Any:
    return (value + (divisor - 1)) // divisor


def strided(count: int, thread: Any, num_threads: int) -> Iterator[Any]:
    """The indices below `count` that are `thread`'s when all take turns.

    A generator to loop over with `for`: its body is emitted once for each turn, under a condition
    where the last turn is not everybody's.
    """
    for turn in range(-(-count // num_threads)):
        index = bind(thread + turn * num_threads) if turn else thread
        if (turn + 1) * num_threads > count:
            with when(index < count):
                yield index
        else:
            yield index


@contextmanager
def share(count: Any, thread: Any, num_threads: int) -> Iterator[Any]:
    """A loop over the indices below `count`, not known here, that are `thread`'s when all take
    turns."""
    turns = bind(floor_div(count + (num_threads - 1) - thread, num_threads))
    with B.serial(turns) as turn:
        yield bind(thread + turn * num_threads)


def floor_div(value: Any, divisor: int) -> Any:
    """value // divisor for a value that is not negative."""
    return T.truncdiv(value, divisor) if divisor != 1 else value


def floor_mod(value: Any, divisor: int) -> Any:
    """value % divisor for a value that is not negative."""
    return T.truncmod(value, divisor)
