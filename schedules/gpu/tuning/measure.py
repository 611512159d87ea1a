"""Compiles kernels for a device of this machine, and times them there."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from ....artifact.dtypes import numpy_dtype
from ....artifact.errors import CompileError
from ...pipeline import GPU_TIR_PIPELINE
from ...tuning.records import Records
from ...tuning.search import Comparison, Parameters, Space
from ...tuning.session import Task
from ..half_rows import half_rows, padded
from ..limits import GpuLimits
from ..linear import linear
from ..linear_operator import LinearOperator
from ..linear_schedule import LinearSchedule, default_schedule, parameters_of
from ..matrix_gemm import can_use_matrices, workspace_size
from .demands import demands_of
from .inputs import Batch, random_batch, random_weights
from .records import record_name, tuned_schedule
from .spaces import BUCKETS, candidates, rows_of, space_of

logger = logging.getLogger(__name__)

_COLD_BYTES, _MOST_COPIES = 128 << 20, 128
"""Of a layer's weights together: calls take one copy after the other, so that they come from
memory, as a model's do."""
_SAMPLE_S, _COMPARISON_S, _LEAST_ROUNDS = 0.02, 4.0, 5
_FLOAT_TOLERANCE, _HALF_TOLERANCE = 3e-5, 2e-3
"""Of the largest value in a row: what another order of sums, and halves in place of float32, may
make of a result."""


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """What records are kept for: an operator, and the limits that its model has for all."""

    operator: LinearOperator
    limits: GpuLimits

    @property
    def name(self) -> str:
        return record_name(self.operator, self.limits)

    @property
    def weight_bytes(self) -> int:
        return sum(
            math.prod(shape) * numpy_dtype(dtype).itemsize
            for weight in self.operator.weights
            for shape, dtype in weight.format.parts(weight.n, weight.k).values()
        )


@dataclass(frozen=True, slots=True)
class GpuLab:
    """Where kernels are compiled for and run. `compiling` is what to be in meanwhile."""

    target: tvm.target.Target
    device: Any
    compiling: Callable[[], AbstractContextManager[None]]

    def prepare(self) -> None:
        """Nothing: the device is its own."""

    def tasks(self, operator: LinearLayer, known: Records) -> list[Task[LinearLayer]]:
        return [Task(operator, bucket) for bucket in BUCKETS]

    def space(self, task: Task[LinearLayer]) -> tuple[Space, list[Parameters]]:
        """See `Lab` in `tuning.session`."""
        layer = task.operator
        found = candidates(layer.operator, task.bucket, layer.limits)
        return space_of(layer.operator, task.bucket, layer.limits), found

    def bench(self, task: Task[LinearLayer], known: Records) -> "LayerBench":
        return LayerBench(self, task, known)

    def build(self, func: tvm.tirx.PrimFunc) -> Callable[..., None]:
        """The function compiled, to be called with tensors of the device."""
        with self.compiling(), tvm.transform.PassContext(opt_level=3):
            built = tvm.compile(func, target=self.target, tir_pipeline=GPU_TIR_PIPELINE)
        compiled: Callable[..., None] = built[str(func.attrs["global_symbol"])]
        return compiled

    def tensor(self, array: np.ndarray) -> Any:
        return tvm.runtime.tensor(np.ascontiguousarray(array), self.device)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A layer under some schedule, ready to run; `more` are outputs beside y."""

    run: Callable[..., None]
    more: tuple[Any, ...]


class LayerBench:
    """A layer with random weights: the kernels of a bucket beside what is known of the others,
    their results and times.

    Every kernel must give the default schedule's results, which tests hold against NumPy, within a
    tolerance, for the bucket's batches and odd ones. CompileError if the default cannot run.
    """

    def __init__(self, lab: GpuLab, task: Task[LinearLayer], known: Records) -> None:
        layer = task.operator
        self.lab, self.operator, self.limits = lab, layer.operator, layer.limits
        self.bucket = task.bucket
        known_schedule = tuned_schedule(known, self.operator, self.limits)
        # From the target's limits on: what was found may have fewer tiles.
        self._others = replace(known_schedule, **{self.bucket: self.limits})
        names = list(space_of(self.operator, self.bucket, self.limits))
        self.default = parameters_of(self.limits, names)
        self.start = parameters_of(getattr(known_schedule, self.bucket), names)
        self._has_halves = can_use_matrices(self.operator, self.limits)
        self._seen: set[int] = set()
        rng = np.random.default_rng(0)
        copies = min(-(-_COLD_BYTES // layer.weight_bytes), _MOST_COPIES)
        self._weights = itertools.cycle(random_weights(self.operator, lab.tensor, copies, rng))
        rows = rows_of(self.operator, self.bucket)
        self._batches = [self._batch(m, rng) for m in rows]
        odd = {"one": (), "few": (3, 7), "many": (33, rows[-1] + 5)}[self.bucket]
        self._checks = [*self._batches, *(self._batch(m, rng) for m in odd)]
        self._checked_weights = next(self._weights)
        self._reference = self._built(default_schedule(self.limits))
        self._expected = self._results(self._reference)
        self._calls = [self._num_calls(batch) for batch in self._batches]

    def kernel(self, parameters: Parameters) -> Kernel | None:
        """None where the limits do not allow it, it does not compile, or was there before."""
        if parameters in (self.default, self.start):
            return self._built(self._others.with_parameters(self.bucket, parameters))
        try:
            schedule = self._others.with_parameters(self.bucket, parameters)
            func = linear(self.operator, self.limits, schedule)
            if not demands_of(func).fit(self.limits) or tvm_ffi.structural_hash(func) in self._seen:
                return None
            return self._built(schedule)
        except Exception as error:
            logger.debug("left out %s: %s", parameters, error)
            return None

    def is_right(self, kernel: Kernel) -> bool:
        """Whether its results are the default's, but for rounding."""
        try:
            found = self._results(kernel)
        except CompileError as error:
            logger.debug("left out: %s", error)
            self._results(self._reference)  # raises if it is the device that fails
            return False
        tolerance = _HALF_TOLERANCE if self._has_halves else _FLOAT_TOLERANCE
        return all(
            bool(np.all(np.abs(a - b) <= tolerance * np.abs(b).max(axis=1, keepdims=True)))
            for a, b in zip(found, self._expected, strict=True)
        )

    def compare(self, before: Kernel, after: Kernel, rounds: int) -> Comparison:
        """Both in turn, the one or the other first; fewer rounds where they take long."""
        times: tuple[list[float], list[float]] = ([], [])
        kernels = (before, after)
        for kernel in kernels:
            self._seconds(kernel)
        start = time.perf_counter()
        for number in range(rounds):
            for which in (number % 2, 1 - number % 2):
                times[which].append(self._seconds(kernels[which]))
            if number + 1 >= _LEAST_ROUNDS and time.perf_counter() - start > _COMPARISON_S:
                break
        return Comparison(tuple(times[0]), tuple(times[1]))

    def _built(self, schedule: LinearSchedule) -> Kernel:
        func = linear(self.operator, self.limits, schedule)
        self._seen.add(tvm_ffi.structural_hash(func))
        size = workspace_size(self.operator, schedule.many)
        more = (self.lab.tensor(np.zeros(size, np.float32)),) if size else ()
        return Kernel(self.lab.build(func), more)

    def _batch(self, num_rows: int, rng: np.random.Generator) -> Batch:
        return random_batch(self.operator, num_rows, self.lab.tensor, self._halves_of, rng)

    def _halves_of(self, x: Any) -> tuple[Any, ...]:
        if not self._has_halves:
            return ()
        k, (num_rows, _) = self.operator.k, x.shape
        tensor = self.lab.tensor
        halves = tensor(np.zeros((num_rows, padded(k)), np.float16))
        scales = tensor(np.zeros(num_rows, np.float32))
        self.lab.build(half_rows(k, self.limits))(x, halves, scales)
        return halves, scales

    def _results(self, kernel: Kernel) -> list[np.ndarray]:
        """CompileError if the device refuses."""
        results = []
        with _device_errors(self.lab.device):
            for batch in self._checks:
                batch.y.copyfrom(np.full(batch.y.shape, np.nan, np.float32))
                kernel.run(*batch.arguments(self._checked_weights, kernel.more))
                results.append(batch.y.numpy())
        return results

    def _num_calls(self, batch: Batch) -> int:
        """So many that they take long enough to be timed."""
        once = self._seconds_of(self._reference, batch, 1)
        return max(math.ceil(_SAMPLE_S / max(once, 1e-6)), 1)

    def _seconds(self, kernel: Kernel) -> float:
        """Of a call for each batch."""
        pairs = zip(self._batches, self._calls, strict=True)
        return sum(self._seconds_of(kernel, batch, calls) / calls for batch, calls in pairs)

    def _seconds_of(self, kernel: Kernel, batch: Batch, calls: int) -> float:
        arguments = [
            batch.arguments(weights, kernel.more)
            for weights in itertools.islice(self._weights, calls)
        ]
        with _device_errors(self.lab.device):
            self.lab.device.sync()
            start = time.perf_counter()
            for given in arguments:
                kernel.run(*given)
            self.lab.device.sync()
            return time.perf_counter() - start


@contextmanager
def _device_errors(device: Any) -> Iterator[None]:
    """What the device's runtime raises, as a CompileError of one line."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CompileError(f"kernels do not run on {device}: {lines[-1].strip()}") from error
