"""What the kernels of a function take of a device."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from ..limits import GpuLimits


@dataclass(frozen=True, slots=True)
class Demands:
    """The most that any launch takes: threads of a block, and bytes that they share."""

    threads: int
    shared_bytes: int

    def fit(self, limits: GpuLimits) -> bool:
        return self.threads <= limits.max_threads and self.shared_bytes <= limits.shared_bytes


def demands_of(func: tirx.PrimFunc) -> Demands:
    """Of a function of `kernel.kernel`, before it is compiled."""
    launches = list(_launches(func.body))
    return Demands(
        max((_threads(launch) for launch in launches), default=0),
        max((_shared_bytes(launch) for launch in launches), default=0),
    )


def _children(stmt: Any) -> Iterator[Any]:
    """The statements directly inside."""
    if isinstance(stmt, tirx.SeqStmt):
        yield from stmt.seq
    for name in ("block", "body", "then_case", "else_case"):
        child = getattr(stmt, name, None)
        if isinstance(child, tirx.Stmt):
            yield child


def _statements(stmt: Any) -> Iterator[Any]:
    yield stmt
    for child in _children(stmt):
        yield from _statements(child)


def _launches(stmt: Any) -> Iterator[Any]:
    if _is_thread_extent(stmt):
        yield stmt
        return
    for child in _children(stmt):
        yield from _launches(child)


def _is_thread_extent(stmt: Any) -> bool:
    return isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent"


def _threads(launch: Any) -> int:
    extents = [
        int(stmt.value)
        for stmt in _statements(launch)
        if _is_thread_extent(stmt) and str(stmt.node.thread_tag).startswith("threadIdx")
    ]
    return math.prod(extents)


def _shared_bytes(launch: Any) -> int:
    buffers = [stmt.buffer for stmt in _statements(launch) if isinstance(stmt, tirx.AllocBuffer)]
    return sum(
        math.prod(int(extent) for extent in buffer.shape) * tvm.DataType(str(buffer.dtype)).itemsize
        for buffer in buffers
        if str(buffer.scope()) == "shared"
    )
