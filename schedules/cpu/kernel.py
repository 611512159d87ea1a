"""Kernels under construction, in two forms.

A kernel is written once, its work under `control.parallel`. On its own it is a PrimFunc over
tensors whose parallel loop TVM's thread pool runs. As a part of a larger parallel region (see
`one_region`) it is a subroutine over pointers, called by every thread, which share the loop (see
`shared_loop`). Outside its one parallel loop a kernel must not touch its tensors: a late thread may
come by when they hold something else.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as B

from ..pipeline import SUBROUTINE
from .shared_loop import LINE_BYTES, MAX_THREADS

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Argument:
    """What a subroutine takes at one place.

    `shape` is that of a tensor (strings are symbolic sizes), None for a size or a scalar.
    """

    name: str
    shape: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Subroutine:
    """A kernel as a function of (done, shares, loop, thread, number of threads, *arguments); see
    `Team`."""

    func: tirx.PrimFunc
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Team:
    """What a subroutine knows of the threads that call it."""

    done: Any
    """Address of the int32 that counts its loop's iterations."""
    shares: Any
    """Buffer of int64, a cache line for each thread (see `shared_loop`)."""
    loop: Any
    """Number of its loop."""
    thread: Any
    num_threads: Any


@dataclass(slots=True)
class Kernel:
    """A PrimFunc under construction: declares its arguments, then its body."""

    team: Team | None = None
    """None in a function of its own."""
    sizes: dict[str, Any] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)
    _views: list[tuple[Any, Any]] = field(default_factory=list)

    def join_team(self) -> None:
        """Become a subroutine."""
        done, pointer = B.arg("done", B.handle("int32")), B.arg("shares", B.handle("int64"))
        shares = tirx.decl_buffer((MAX_THREADS, LINE_BYTES // 8), "int64", "shares")
        self._views.append((shares, pointer))
        numbers = (B.arg(name, B.int64()) for name in ("loop", "thread", "num_threads"))
        self.team = Team(done, shares, *numbers)

    def size(self, name: str) -> Any:
        """A symbolic int64 size, the same variable for the same name."""
        if name not in self.sizes:
            if self.team is None:
                self.sizes[name] = tirx.Var(name, "int64")
            else:
                self.arguments.append(Argument(name))
                self.sizes[name] = B.arg(name, B.int64())
        return self.sizes[name]

    def buffer(self, name: str, shape: tuple[Any, ...], dtype: str) -> Any:
        """A tensor argument; strings in `shape` are symbolic sizes."""
        extents = [self.size(s) if isinstance(s, str) else s for s in shape]
        self.arguments.append(Argument(name, shape))
        if self.team is None:
            return B.match_buffer(B.arg(name, B.handle()), extents, dtype)
        buffer = tirx.decl_buffer(extents, dtype, name)
        self._views.append((buffer, B.arg(name, B.handle(dtype))))
        return buffer

    def declare_views(self) -> None:
        """At the start of a subroutine's body: which pointer each tensor is behind."""
        for buffer, pointer in self._views:
            B.add_to_parent(tirx.DeclBuffer(buffer, data=pointer))

    def scalar(self, name: str, dtype: str = "int64") -> Any:
        self.arguments.append(Argument(name))
        return B.arg(name, getattr(B, dtype)())


_under_construction: list[Kernel] = []
_subroutines: list[Kernel] | None = None
"""Where kernels that are emitted as subroutines are noted; None: emit them on their own."""
_emitters: dict[int, tuple[tirx.PrimFunc, Callable[[], tirx.PrimFunc]]] = {}


def current_kernel() -> Kernel:
    return _under_construction[-1]


@contextmanager
def body(llvm_source: str = "") -> Iterator[None]:
    """The single opaque block that Relax's memory passes expect; with the LLVM IR of functions that
    it calls."""
    with B.sblock("root"):
        B.reads()
        B.writes()
        current_kernel().declare_views()
        if not llvm_source:
            yield
            return
        with B.attr(T.int32(0), "pragma_import_llvm", llvm_source):
            yield


@contextmanager
def kernel(name: str) -> Iterator[tuple[Kernel, IRBuilder]]:
    """Build a PrimFunc: `with kernel("name") as (k, ib): …` then `ib.get()`."""
    with IRBuilder() as ib:
        with B.prim_func(s_tir=True):
            B.func_name(name)
            B.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8})
            new = Kernel()
            if _subroutines is not None:
                _subroutines.append(new)
                new.join_team()
            _under_construction.append(new)
            try:
                yield new, ib
            finally:
                _under_construction.pop()


def kernel_factory(emit: Callable[P, tirx.PrimFunc]) -> Callable[P, tirx.PrimFunc]:
    """Decorates a function that emits a kernel: cached, and known to `subroutine`."""
    made: dict[Any, tirx.PrimFunc] = {}

    @functools.wraps(emit)
    def factory(*args: P.args, **kwargs: P.kwargs) -> tirx.PrimFunc:
        key = (args, tuple(sorted(kwargs.items())))
        if key not in made:
            func = made[key] = emit(*args, **kwargs)
            _emitters[id(func)] = func, functools.partial(emit, *args, **kwargs)
        return made[key]

    return factory


def subroutine(func: tirx.PrimFunc) -> Subroutine:
    """The other form of a kernel that a `kernel_factory` made."""
    return _subroutine(id(func))


@functools.cache
def _subroutine(key: int) -> Subroutine:
    global _subroutines
    _, emit = _emitters[key]
    _subroutines = []
    try:
        func = emit()
        (built,) = _subroutines
    finally:
        _subroutines = None
    func = func.without_attr("global_symbol").with_attr(SUBROUTINE, True)
    return Subroutine(func, tuple(built.arguments))
