"""The part of `gpu_check` that runs on the device. It needs no compiler."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..artifact.dtypes import numpy_dtype
from ..artifact.tensor_cache import TensorCacheReader
from ..engine.device_check import check_device
from ..engine.device_runner import DeviceRunner, load_device_parameters
from ..engine.devices import DeviceMemory
from ..engine.engine_config import EngineConfig
from ..engine.loader import model_info, plan_for
from ..engine.loop import EngineLoop
from ..engine.parameters import Parameter, read_parameters
from ..engine.runtime import Library
from ..engine.tvm_runtime import tvm_ffi
from .gpu_check_files import (
    EXPECTED,
    LIMITS_LIBRARY,
    MODEL_LIBRARY,
    NUM_PAGES,
    ROPES,
    STEPS,
    step_input,
)  # fmt: skip
from .limits import Machine, ModelCost, StepCost, step_cost
from .worker_everycast import EngineWorks, engine_config
from .works import Work, parse_work

TOLERANCE = {"float32": 1e-3, "float16": 2e-2}
"""Of logits, relative to the largest, by the dtype of the scheme's values."""
MOST_RUNS, ENOUGH_S = 10, 2.0
"""Of a kernel that measures the device."""
_NOISE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Checked:
    """A step of a tiny model: the largest error of its logits, relative to the largest logit."""

    case: str
    step: str
    error: float
    tolerance: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True, slots=True)
class Speed:
    """A work on a shape. `percent` is the least time that `bound` allows, of the measured one."""

    work: str
    tokens_per_s: float
    percent: float
    bound: str


def check_numerics(folder: Path, case: str, device: str) -> Iterator[Checked]:
    """The steps of a tiny model, each against the CPU's logits."""
    memory = DeviceMemory(device)
    library = Library(folder / "cases" / case / MODEL_LIBRARY, f"{memory.kind}:{memory.index}")
    weights = TensorCacheReader(folder / "cases" / case)
    check_device(library, read_parameters(library.metadata)[0], memory)
    parameters = load_device_parameters(library, weights, memory)
    runner = DeviceRunner(library, memory, parameters, model_info(library.metadata), NUM_PAGES)
    tolerance = TOLERANCE[library.metadata["kv_dtype"]]
    with np.load(folder / "cases" / case / EXPECTED) as expected:
        for i, step in enumerate(STEPS):
            wanted = expected[f"arr_{i}"]
            runner.execute(step_input(step))
            error = float(np.abs(runner.logits() - wanted).max() / np.abs(wanted).max())
            yield Checked(case, step.what, error, tolerance)
    runner.close()


def measure_limits(folder: Path, device: str, read_bytes: int, operations: int) -> Machine:
    """Bytes read, and float32 multiplications and additions, a second: the best of several runs of
    small kernels."""
    memory = DeviceMemory(device)
    module = tvm_ffi.load_module(str((folder / LIMITS_LIBRARY).absolute()))

    def best(name: str, inputs: np.ndarray, outputs: int) -> float:
        x = memory.upload(inputs, "float32")
        y = memory.empty((outputs,), "float32")
        function = module[name]
        times: list[float] = []
        while len(times) < MOST_RUNS and sum(times) < ENOUGH_S:
            memory.synchronize()
            start = time.perf_counter()
            function(x, y)
            memory.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    read = best("read", np.zeros(read_bytes // 4, np.float32), 4096 * 256)
    multiply = best("multiply", np.full(2, 0.5, np.float32), 2048 * 256)
    return Machine(read_bytes / read, operations / multiply)


def measure_shape(
    folder: Path, shape: str, device: str, works: list[str], machine: Machine,
    deadline: float, note: Callable[[str], None],
) -> Iterator[Speed]:  # fmt: skip
    """Each work on a model of random weights, as far as the time (`time.monotonic`) goes."""
    memory = DeviceMemory(device)
    library = Library(folder / "shapes" / shape / MODEL_LIBRARY, f"{memory.kind}:{memory.index}")
    parameters = read_parameters(library.metadata)[0]
    check_device(library, parameters, memory)
    info = model_info(library.metadata)
    parsed = [parse_work(name) for name in works]
    config = EngineConfig.from_dict({"mode": "server", **engine_config(parsed)})
    plan = plan_for(config, info, library, memory)
    with np.load(folder / "shapes" / shape / ROPES) as ropes:
        tensors = _random_parameters(parameters, dict(ropes), memory)
    runner = DeviceRunner(library, memory, tensors, info, plan.num_pages)
    limits = config.resolve(info, plan.num_pages)
    loop = EngineLoop(runner, limits, tokenizer_size=info.vocab_size, eos_token_ids=())
    loop.start()
    engine = EngineWorks(loop, info.vocab_size)
    cost = _cost(parameters, info.page_bytes / info.page_size)
    try:
        for work in parsed:
            figures: list[float] = []
            for seed in range(1 + 3):  # once untimed
                if time.monotonic() > deadline:
                    break
                tokens, seconds = engine.run(work.name, seed)
                figures += [tokens / seconds] if seed else []
            if not figures:
                note(f"{shape}: no time left for {work.name}")
                continue
            yield _speed(work, statistics.median(figures), cost, machine)
    finally:
        loop.shutdown()


def _speed(work: Work, tokens_per_s: float, cost: ModelCost, machine: Machine) -> Speed:
    step: StepCost | None = step_cost(work, cost)
    assert step is not None
    least = step.seconds(machine)
    percent = 100 * tokens_per_s * least / step.tokens
    return Speed(work.name, tokens_per_s, round(percent, 1), step.bound(machine))


def _cost(parameters: list[Parameter], kv_bytes_per_token: float) -> ModelCost:
    has_head = any("lm_head" in parameter.name for parameter in parameters)
    read = [p for p in parameters if not (has_head and "embed_tokens" in p.name)]
    matrices = [p for p in read if len(p.shape) == 2 and "scale" not in p.name]
    head = {"lm_head", "embed_tokens"}
    values = {p.name: math.prod(p.shape) * _values_per_word(p) for p in matrices}
    head_values = sum(v for name, v in values.items() if any(part in name for part in head))
    return ModelCost(
        sum(parameter.num_bytes for parameter in read),
        kv_bytes_per_token,
        sum(values.values()) - head_values,
        head_values,
    )


def _values_per_word(parameter: Parameter) -> int:
    """q4f16_1 has 8 numbers in a word."""
    return 8 if parameter.dtype == "uint32" else 1


def _random_parameters(
    parameters: list[Parameter], ropes: Mapping[str, np.ndarray], memory: DeviceMemory
) -> list[Any]:
    """Numbers of a size that keeps activations near 1: random words, small scales, norms of 1."""
    noise = np.frombuffer(np.random.default_rng(0).bytes(_NOISE_BYTES), np.uint8)
    tensors = []
    for parameter in parameters:
        dtype = numpy_dtype(parameter.dtype)
        if parameter.name in ropes:
            array = ropes[parameter.name]
        elif dtype == np.uint32:
            count = math.prod(parameter.shape)
            words = noise.view(np.uint32)
            array = np.resize(words, count) if count > len(words) else words[:count]
            array = array.reshape(parameter.shape)
        elif len(parameter.shape) == 1:
            array = np.ones(parameter.shape, dtype)
        else:
            array = np.full(parameter.shape, 1 / (4.6 * 64), dtype)
        tensors.append(memory.upload(np.ascontiguousarray(array), parameter.dtype))
    return tensors
