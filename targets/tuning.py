"""Measure the linear kernels of a model for a target, and keep what is faster."""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from ..artifact.errors import CompileError, RequestError
from ..artifact.host import host_features, host_platform
from ..schedules.cpu.isa import isa_of
from ..schedules.cpu.linear_operator import LinearOperator
from ..schedules.cpu.tuning.measure import Lab
from ..schedules.cpu.tuning.records import (
    Record,
    all_records,
    cpu_name,
    read_records,
    user_file,
    write_records,
)  # fmt: skip
from ..schedules.cpu.tuning.session import Task, TuneEvent, tune
from .build import BuildRequest, open_source
from .cpu import linear_operators
from .library import export_graph
from .target import CompileTarget, find_target

_TRACKER_TIMEOUT_S = 5
_SESSION_TIMEOUT_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """What `everycast tune` asks for. `trials` is for each operator and bucket of tokens."""

    model: str
    target: str
    quantization: str | None
    activations: str
    operator: str | None
    """A part of the names of those to tune; None: all."""
    trials: int
    minutes: float | None
    rpc: str | None = None
    """HOST:PORT of a TVM RPC tracker; None: measure on this machine."""
    device_key: str | None = None


@dataclass(frozen=True, slots=True)
class TuneResult:
    """`new` are (operator's name, bucket, record), as they were found; the rest was there."""

    file: Path
    new: tuple[tuple[str, str, Record], ...]
    num_skipped: int


class Tuning:
    """A prepared run: everything that can be wrong has been looked at."""

    def __init__(self, request: TuneRequest, progress: Callable[[int, int], None]) -> None:
        """`progress` gets (done, total) bytes where the model is fetched first.

        Raises EverycastError: the model or target is unknown, no operator has such a name, the
        target's code does not run here, or no machine answers.
        """
        self.request = request
        tracker = _tracker_address(request)
        target = find_target(request.target, activations=request.activations)
        if target.name != "cpu":
            raise RequestError(f"only kernels of target cpu can be tuned, not of {target.name}")
        if tracker is None:
            _check_runs_here(target)
        self.operators = _chosen(_operators(request, target, progress), request.operator)
        spec = tvm.target.Target(target.spec)
        session = None if tracker is None else _connect(tracker, request.device_key or "")
        self.lab = Lab(spec, isa_of(spec), target.export, session)
        self.cpu = cpu_name(spec)
        self.file = user_file(self.cpu)

    def run(self, report: Callable[[TuneEvent], None]) -> TuneResult:
        """Tune until the trials or the minutes are used up. Every record is on disk as soon as it
        is found; KeyboardInterrupt loses only the one in work."""
        mine = read_records(self.file, self.cpu)
        new: list[tuple[str, str, Record]] = []
        num_skipped = 0
        limit = self.request.minutes
        end = None if limit is None else time.monotonic() + 60 * limit

        def keep(task: Task, record: Record) -> None:
            mine.add(task.operator, task.bucket, record)
            write_records(self.file, mine)
            new.append((task.operator.name, task.bucket, record))

        def watch(event: TuneEvent) -> None:
            nonlocal num_skipped
            num_skipped += event.kind == "skip"
            report(event)

        tune(
            self.operators,
            self.lab,
            all_records(self.cpu),
            trials=self.request.trials,
            is_over=lambda: end is not None and time.monotonic() > end,
            keep=keep,
            report=watch,
        )
        return TuneResult(self.file, tuple(new), num_skipped)


def _operators(
    request: TuneRequest, target: CompileTarget, progress: Callable[[int, int], None]
) -> list[LinearOperator]:
    def report(stage: str, done: int, total: int, unit: str) -> None:
        if unit == "bytes":
            progress(done, total)

    asked = BuildRequest(request.model, request.target, request.quantization, Path())
    source = open_source(asked, report)
    kv_dtype = target.kv_dtype(source.plan.dtype)
    graph = export_graph(source.config, source.plan.formats, kv_dtype)
    return linear_operators(*graph, target)


def _chosen(operators: Sequence[LinearOperator], part: str | None) -> list[LinearOperator]:
    chosen = [op for op in operators if part is None or part in op.name]
    if not chosen:
        names = ", ".join(operator.name for operator in operators) or "none"
        raise RequestError(f"no operator's name contains '{part}'; the model has {names}")
    return chosen


def _check_runs_here(target: CompileTarget) -> None:
    missing = sorted(target.required_features - host_features())
    if target.platform != host_platform() or missing:
        lacks = f" (it lacks {', '.join(missing)})" if target.platform == host_platform() else ""
        raise CompileError(
            f"code for {target.spec['mcpu']} does not run on this machine{lacks}; leave --target "
            "out, or measure on another machine with --rpc"
        )


def _connect(address: tuple[str, int], key: str) -> Any:
    """An RPC session with a machine that `key` stands for, of the tracker at (host, port)."""
    from tvm import rpc

    host, port = address
    try:
        socket.create_connection(address, _TRACKER_TIMEOUT_S).close()  # TVM would try for a minute
    except OSError as error:
        raise CompileError(
            f"no RPC tracker answers at {host}:{port} ({error.strerror or error}); start one with "
            f"python -m tvm.exec.rpc_tracker --port {port}"
        ) from None
    known = rpc.connect_tracker(host, port)
    if not known.summary()["queue_info"].get(key, {}).get("free"):
        raise CompileError(
            f"the RPC tracker {host}:{port} has no free machine of device key '{key}'; start one "
            f"with python -m tvm.exec.rpc_server --tracker {host}:{port} --key {key}"
        )
    return known.request(key, session_timeout=_SESSION_TIMEOUT_S)


def _tracker_address(request: TuneRequest) -> tuple[str, int] | None:
    """Where the tracker of a valid request is; None to measure here."""
    if request.rpc is None and request.device_key is None:
        return None
    host, _, port = (request.rpc or "").rpartition(":")
    if not host or not port.isdigit() or not request.device_key:
        raise RequestError(
            "to measure on another machine give both --rpc HOST:PORT, of a TVM RPC tracker, and "
            f"--device-key KEY (not {request.rpc} and {request.device_key})"
        )
    return host, int(port)
