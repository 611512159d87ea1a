"""Measure the linear kernels of a model for a target, and keep what is faster."""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tvm

from ..artifact.errors import CompileError, RequestError
from ..artifact.host import host_features, host_platform
from ..artifact.tuning import TunedDevice
from ..schedules.cpu.isa import isa_of
from ..schedules.cpu.tuning.measure import CpuLab
from ..schedules.cpu.tuning.records import check_parameters as check_cpu
from ..schedules.cpu.tuning.records import cpu_name
from ..schedules.gpu.linear_schedule import check_parameters as check_gpu
from ..schedules.gpu.tuning.measure import GpuLab
from ..schedules.tuning.records import (
    Check,
    Record,
    all_records,
    read_records,
    user_file,
    write_records,
)  # fmt: skip
from ..schedules.tuning.session import Lab, NamedOperator, Task, TuneEvent, tune
from .build import BuildRequest, open_source
from .cpu import linear_operators
from .gpu import linear_layers
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
    device: TunedDevice | None = None
    """Of this machine, of the target's kind; None for the CPU."""
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
        target = find_target(_target_name(request), activations=request.activations)
        if target.name != "cpu":
            _check_can_be_measured(target, request)
        elif tracker is None:
            _check_runs_here(target)
        graph = _graph(request, target, progress)
        if request.device is None:
            self._prepare_cpu(target, graph, tracker)
        else:
            self._prepare_device(target, graph, request.device)
        self.file = user_file(self.device)

    def _prepare_cpu(
        self, target: CompileTarget, graph: "_Graph", tracker: tuple[str, int] | None
    ) -> None:
        self.operators: Sequence[NamedOperator]
        self.operators = _chosen(linear_operators(*graph, target), self.request.operator)
        spec = tvm.target.Target(target.spec)
        session = None
        if tracker is not None:
            session = _connect(tracker, self.request.device_key or "")
        self._lab: Lab[Any] = CpuLab(spec, isa_of(spec), target.export, session)
        self._check: Check = check_cpu
        self.device = self.label = cpu_name(spec)

    def _prepare_device(self, target: CompileTarget, graph: "_Graph", device: TunedDevice) -> None:
        self.operators = _chosen(linear_layers(*graph, target), self.request.operator)
        with target.compiling():
            spec = tvm.target.Target(target.spec)
        here = tvm.device(device.kind, device.index)
        self._lab = GpuLab(spec, here, target.compiling)
        self._check = check_gpu
        self.device, self.label = device.name, device.label

    def run(self, report: Callable[[TuneEvent], None]) -> TuneResult:
        """Tune until the trials or the minutes are used up. Every record is on disk as soon as it
        is found; KeyboardInterrupt loses only the one in work."""
        mine = read_records(self.file, self.device, self._check)
        new: list[tuple[str, str, Record]] = []
        num_skipped = 0
        limit = self.request.minutes
        end = None if limit is None else time.monotonic() + 60 * limit

        def keep(task: Task[Any], record: Record) -> None:
            mine.add(task.operator.name, task.bucket, record)
            write_records(self.file, mine)
            new.append((task.operator.name, task.bucket, record))

        def watch(event: TuneEvent) -> None:
            nonlocal num_skipped
            num_skipped += event.kind == "skip"
            report(event)

        tune(
            self.operators,
            self._lab,
            all_records(self.device, self._check),
            trials=self.request.trials,
            is_over=lambda: end is not None and time.monotonic() > end,
            keep=keep,
            report=watch,
        )
        return TuneResult(self.file, tuple(new), num_skipped)


_Graph = tuple[tvm.IRModule, list[str]]


def _graph(
    request: TuneRequest, target: CompileTarget, progress: Callable[[int, int], None]
) -> _Graph:
    """The model's functions before any target, and its parameters' names."""

    def report(stage: str, done: int, total: int, unit: str) -> None:
        if unit == "bytes":
            progress(done, total)

    asked = BuildRequest(request.model, request.target, request.quantization, Path())
    source = open_source(asked, report)
    return export_graph(source.config, source.plan.formats, target.kv_dtype(source.plan.dtype))


def _target_name(request: TuneRequest) -> str:
    """With the device's architecture, where none is named: machine code for one is enough."""
    device = request.device
    if device is None or device.architecture is None or ":" in request.target:
        return request.target
    return f"{request.target}:{device.architecture}"


Op = TypeVar("Op", bound=NamedOperator)


def _chosen(operators: Sequence[Op], part: str | None) -> list[Op]:
    chosen = [op for op in operators if part is None or part in op.name]
    if not chosen:
        names = ", ".join(operator.name for operator in operators) or "none"
        raise RequestError(f"no operator's name contains '{part}'; the model has {names}")
    return chosen


def _check_can_be_measured(target: CompileTarget, request: TuneRequest) -> None:
    if target.limits is None:
        raise RequestError(
            f"kernels of target {target.name} run in browsers, where they cannot be measured; "
            "tune another target"
        )
    if request.rpc is not None:
        raise RequestError(
            f"only the CPU can be tuned with --rpc: TVM's RPC servers have no devices of "
            f"everycast's; run everycast tune --target {request.target} on that machine"
        )
    if target.platform != host_platform():
        raise CompileError(f"code for {target.platform} does not run on this machine; tune there")


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
