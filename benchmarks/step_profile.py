"""Where the time of one step goes, by operator.

    EVERYCAST_ONE_REGION=0 everycast compile MODEL -o FOLDER
    TVM_NUM_THREADS=2 python -m everycast.benchmarks.step_profile ARTIFACT [--tokens N]

One step of N new tokens (1 is decoding) after `--context` others goes through the engine's runner
while the VM tells which kernels it calls with which arguments. The same calls are then replayed in
the same order, round after round, each timed by itself. An operator's time is the sum over its
calls of their medians. The last rows are the sum of all operators, and the median of whole steps
through the runner without any of this: the difference is what the VM and the preparation of its
inputs cost.
"""

import argparse
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.loader import open_artifact
from ..engine.model_runner import StepInput
from ..engine.paged_runner import PagedRunner
from ..engine.parameters import load_parameters
from ..engine.runtime import Library


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call of a step; `weight_bytes`: of packed weights that it reads."""

    name: str
    run: Callable[[], object]
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """All calls of one kernel in a step."""

    name: str
    num_calls: int
    milliseconds: float
    percent: float
    gigabytes_per_s: float
    """Of packed weights; 0 for a kernel without."""


def record_calls(library: Library, step: Callable[[], object]) -> list[KernelCall]:
    """Run `step` once; the kernel calls that the library's VM made for it, in order."""
    calls: list[KernelCall] = []

    def instrument(
        func: Callable[..., object], name: str, before_run: bool, _: Any, *args: Any
    ) -> int:
        if before_run and "." not in name:  # builtins are called vm.builtin.…
            reads = not name.startswith("embedding")  # that one reads a row
            num_bytes = sum(map(_weight_bytes, args)) if reads else 0
            calls.append(KernelCall(name, lambda: func(*args), num_bytes))
        return 0

    set_instrument = library.function("set_instrument")
    set_instrument(instrument)
    step()
    set_instrument(lambda *_: 0)
    return calls


def _weight_bytes(arg: Any) -> int:
    """Packed weights are the only flat tensors of bytes."""
    is_packed = str(getattr(arg, "dtype", "")) == "uint8" and len(arg.shape) == 1
    return int(arg.shape[0]) if is_packed else 0


def time_calls(calls: Sequence[KernelCall], num_rounds: int) -> list[OperatorTime]:
    """Replay the step; its operators by time, longest first."""
    times = np.empty((num_rounds, len(calls)))
    for row in times:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call.run()
            row[i] = time.perf_counter() - start
    medians = np.median(times, axis=0)
    by_name: dict[str, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        by_name[call.name].append(i)
    rows = []
    for name, members in by_name.items():
        seconds = float(medians[members].sum())
        num_bytes = sum(calls[i].weight_bytes for i in members)
        share = 100 * seconds / float(medians.sum())
        rate = num_bytes / seconds / 1e9
        rows.append(OperatorTime(_short(name), len(members), seconds * 1e3, share, rate))
    return sorted(rows, key=lambda row: -row.milliseconds)


def _short(name: str) -> str:
    """Without the digest that makes a kernel's name unique."""
    return re.sub(r"_[0-9a-f]{8}$", "", name)


def make_step(num_tokens: int, first: int, page_size: int) -> StepInput:
    """Tokens `first` to `first + num_tokens` of the one sequence; logits of the last."""
    pages = np.arange(-(-(first + num_tokens) // page_size), dtype=np.int32)
    return StepInput(
        input_ids=np.arange(num_tokens, dtype=np.int32) + 100,
        positions=np.arange(first, first + num_tokens, dtype=np.int32),
        query_offsets=np.array([0, num_tokens], np.int32),
        block_tables=pages[None],
        logit_rows=np.array([num_tokens - 1], np.int32),
    )


def table(rows: Sequence[OperatorTime], step_ms: float) -> str:
    """Markdown."""
    lines = ["| operator | calls | ms | % | GB/s of weights |", "|---|---|---|---|---|"]
    for row in rows:
        rate = f"{row.gigabytes_per_s:.1f}" if row.gigabytes_per_s else ""
        cells = f"{row.num_calls} | {row.milliseconds:.3f} | {row.percent:.1f} | {rate} |"
        lines.append(f"| {row.name} | {cells}")
    lines.append(f"| sum | | {sum(row.milliseconds for row in rows):.3f} | 100 | |")
    lines.append(f"| whole step | | {step_ms:.3f} | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=1, help="new tokens of the step")
    parser.add_argument("--context", type=int, default=64, help="tokens before them")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    if "TVM_NUM_THREADS" not in os.environ:
        parser.error("set TVM_NUM_THREADS, the number of threads")
    artifact = open_artifact(options.artifact)
    parameters = load_parameters(artifact.folder, artifact.library, artifact.weights)
    page_size = artifact.info.page_size
    num_pages = -(-(options.context + options.tokens) // page_size)
    runner = PagedRunner(artifact.library, parameters, artifact.info, num_pages)
    if options.context:
        runner.execute(make_step(options.context, 0, page_size))
    step = make_step(options.tokens, options.context, page_size)
    step_times = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        runner.execute(step)
        step_times.append(time.perf_counter() - start)
    calls = record_calls(artifact.library, lambda: runner.execute(step))
    rows = time_calls(calls, options.rounds)
    print(table(rows, statistics.median(step_times) * 1e3))


if __name__ == "__main__":
    main()
