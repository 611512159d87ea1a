"""Compiles kernels and times them, on this machine or another one."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from ...pipeline import CPU_TIR_PIPELINE
from ...tuning.records import Records
from ...tuning.search import Comparison, Parameters, Space, candidates_of
from ...tuning.session import Task
from ..isa import CpuIsa
from ..linear_inputs import activation_specs, activation_terms
from ..linear_operator import LinearOperator
from ..linear_schedule import LinearSchedule
from .records import tuned_schedule
from .spaces import MANY_TOKENS, SPACES, bucket_parameters

_FLUSH_BYTES = 128 << 20
"""Written before each call of a few tokens: a model's weights come from memory, not the cache."""
_FEW_TOKENS = 16
_LEAST_ROUND_MS = 2
_LARGEST_BYTE = 60
"""Of random weights: any two or four such bytes are a float16, bfloat16 or float32 up to 1."""


@dataclass(slots=True)
class CpuLab:
    """Where kernels are compiled for and run. `session` is TVM's RPC session of another machine."""

    target: tvm.target.Target
    isa: CpuIsa
    export: Callable[[Any, Path], None]
    """Writes a compiled executable as a shared library."""
    session: Any = None
    device: Any = field(init=False)

    def __post_init__(self) -> None:
        self.device = tvm.cpu() if self.session is None else self.session.cpu()

    def prepare(self) -> None:
        """One thread for all kernels of the process that measures. In a model the threads of a
        region are awake; here waking them would take longer than many a call, and hide what is
        measured."""
        name, all_cores = "runtime.config_threadpool", 1
        find = tvm.get_global_func if self.session is None else self.session.get_function
        find(name)(all_cores, 1)

    def tasks(self, operator: LinearOperator, known: Records) -> list[Task[LinearOperator]]:
        """In order: `many` decides which tiles there are for a few tokens."""
        sizes = self._num_tokens(operator, known)
        return [Task(operator, bucket) for bucket in SPACES if sizes[bucket] > 0]

    def space(self, task: Task[LinearOperator]) -> tuple[Space, list[Parameters]]:
        """See `Lab` in `tuning.session`."""
        space = SPACES[task.bucket]
        return space, candidates_of(space)

    def bench(self, task: Task[LinearOperator], known: Records) -> "BucketBench":
        return BucketBench(self, task, known)

    def num_tokens(self, task: Task[LinearOperator], known: Records) -> int:
        """Of the batch that a task is timed with."""
        return self._num_tokens(task.operator, known)[task.bucket]

    def _num_tokens(self, operator: LinearOperator, known: Records) -> dict[str, int]:
        largest = tuned_schedule(known, operator, self.isa).tile_tokens
        return {"many": MANY_TOKENS, "few": largest - 2, "one": 1}

    def tensor(self, array: np.ndarray) -> Any:
        return tvm.runtime.tensor(array, self.device)

    def load(self, func: tvm.tirx.PrimFunc) -> Any:
        """The function compiled, as a module on the machine that measures."""
        with tvm.transform.PassContext(opt_level=3):
            built = tvm.compile(func, target=self.target, tir_pipeline=CPU_TIR_PIPELINE)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{func.attrs['global_symbol']}.so"
            self.export(built, path)
            if self.session is None:
                return tvm.runtime.load_module(str(path))
            self.session.upload(bytearray(path.read_bytes()), path.name)
            return self.session.load_module(path.name)


@dataclass(slots=True)
class Kernel:
    """An operator under some schedule, ready to run."""

    module: Any
    name: str


class OperatorBench:
    """An operator with random weights; its kernels' results and times.

    `num_tokens` is the batch that is timed. Every kernel must give the default schedule's bits
    (which tests hold against NumPy), for this batch and an odd one.
    """

    def __init__(self, lab: CpuLab, operator: LinearOperator, num_tokens: int) -> None:
        self.lab, self.operator, self.num_tokens = lab, operator, num_tokens
        rng = np.random.default_rng(0)
        weights: list[Any] = []
        for weight, has_bias in zip(operator.weights, operator.biases, strict=True):
            packed = rng.integers(0, _LARGEST_BYTE, weight.num_bytes, dtype=np.uint8)
            weights.append(lab.tensor(packed))
            if has_bias:
                weights.append(lab.tensor(rng.standard_normal(weight.n, dtype=np.float32)))
        self._round = self._rounding()
        batches = dict.fromkeys((num_tokens, num_tokens + num_tokens // 2 + 2))
        self._calls = [self._arguments(m, weights, rng) for m in batches]
        self.default = self.kernel(operator.default_schedule(lab.isa))
        self._expected = self._results(self.default)

    def kernel(self, schedule: LinearSchedule) -> Kernel:
        func = self.operator.kernel(self.lab.isa, schedule)
        return Kernel(self.lab.load(func), str(func.attrs["global_symbol"]))

    def is_right(self, kernel: Kernel) -> bool:
        """Whether its results are the default's, to the last bit."""
        pairs = zip(self._results(kernel), self._expected, strict=True)
        return all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in pairs)

    def compare(self, before: Kernel, after: Kernel, rounds: int) -> Comparison:
        """Both in turn, the one or the other first."""
        times: tuple[list[float], list[float]] = ([], [])
        timers = [self._timer(kernel) for kernel in (before, after)]
        arguments, _ = self._calls[0]
        for number in range(rounds):
            for which in (number % 2, 1 - number % 2):
                times[which].append(float(timers[which](*arguments).median))
        return Comparison(tuple(times[0]), tuple(times[1]))

    def _timer(self, kernel: Kernel) -> Any:
        """Few tokens wait for the weights: each call finds the caches cold. Many compute."""
        is_few = self.num_tokens <= _FEW_TOKENS
        options = (
            {"number": 1, "repeat": 3, "cache_flush_bytes": _FLUSH_BYTES}
            if is_few
            else {"number": 1, "repeat": 1, "min_repeat_ms": _LEAST_ROUND_MS}
        )
        return kernel.module.time_evaluator(kernel.name, self.lab.device, **options)

    def _arguments(
        self, m: int, weights: Sequence[Any], rng: np.random.Generator
    ) -> tuple[list[Any], list[Any]]:
        """(what a kernel takes for m tokens, the outputs among it)."""
        operator, tensor = self.operator, self.lab.tensor
        x = tensor(rng.standard_normal((m, operator.weights[0].k), dtype=np.float32))
        arguments = [*self._rounded(x), *weights]
        if operator.residual:
            shape = (m, operator.weights[0].n)
            arguments.append(tensor(rng.standard_normal(shape, dtype=np.float32)))
        written = operator.weights if operator.activation is None else operator.weights[:1]
        outputs = [tensor(np.full((m, weight.n), np.nan, np.float32)) for weight in written]
        return [*arguments, *outputs], outputs

    def _rounding(self) -> Any:
        """The function that rounds x for the kernels; None where they take it as it is."""
        weights, terms = self.operator.weights, self.operator.terms
        if not terms:
            return None
        func = activation_terms(weights, terms, "mixed", "mlp", self.lab.isa)
        return self.lab.load(func)[str(func.attrs["global_symbol"])]

    def _rounded(self, x: Any) -> list[Any]:
        """x as the kernels take it."""
        if self._round is None:
            return [x]
        specs = activation_specs(self.operator.weights, x.shape[0], self.operator.terms)
        buffers = [self.lab.tensor(np.zeros(shape, dtype)) for shape, dtype in specs]
        self._round(x, *buffers)
        return buffers

    def _results(self, kernel: Kernel) -> list[np.ndarray]:
        results = []
        for arguments, outputs in self._calls:
            for output in outputs:
                output.copyfrom(np.full(output.shape, np.nan, np.float32))
            kernel.module[kernel.name](*arguments)
            results += [output.numpy() for output in outputs]
        return results


class BucketBench:
    """A task's kernels: those of a bucket, beside what is known of the operator's others."""

    def __init__(self, lab: CpuLab, task: Task[LinearOperator], known: Records) -> None:
        operator, bucket = task.operator, task.bucket
        self._bench = OperatorBench(lab, operator, lab.num_tokens(task, known))
        self._schedule = tuned_schedule(known, operator, lab.isa)
        self.default = bucket_parameters(operator.default_schedule(lab.isa), bucket)
        self.start = bucket_parameters(self._schedule, bucket)
        self.is_right = self._bench.is_right
        self.compare = self._bench.compare

    def kernel(self, parameters: Parameters) -> Kernel:
        return self._bench.kernel(self._schedule.with_parameters(parameters))
