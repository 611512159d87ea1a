"""Checks a GPU: are the kernels right, and how fast are they?

    python -m everycast.benchmarks.gpu_check --device cuda

First tiny models of random weights, whose logits are compared with the CPU's; then speed of models
of real shapes beside what the device can do at most, and beside torch and vLLM where these are
installed. A machine without a compiler can run what another one prepared. Ends with exit code 1 if
a kernel is wrong. `gpu_check.sh` is the same with a fresh environment.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..artifact.errors import CapacityError, EverycastError
from ..engine.device_choice import best_kind
from ..engine.devices import AUTO, DeviceMemory, split_device
from . import gpu_check_run as run
from .gpu_check_files import CHECK_JSON
from .gpu_peers import PEERS, matrix_peak, measure_peer
from .limits import Machine
from .shapes import Shape, find_shape
from .workers import BenchError
from .works import parse_work

MINUTES = 7.5
WORKS = "decode,prefill_512,batch_8,batch_32"
TINY = Shape("llama", 2, 256, 512, 4, 2, 64, 1024, 10_000.0, True)
"""For a test of the check itself."""

Results = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 fine, 1 something is wrong, 2 it cannot be run."""
    options = _options().parse_args(arguments)
    try:
        return _check(options)
    except (EverycastError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--device", default=AUTO, help="auto, cuda, vulkan, cuda:1; to prepare, perhaps :ARCH"
    )
    parser.add_argument("--shape", default="llama-3.1-8b,llama-3.2-1b", help="by commas")
    parser.add_argument("--works", default=WORKS, help=f"by commas; default {WORKS}")
    parser.add_argument("--cases", type=int, default=99, help="most tiny models")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"default {MINUTES}")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="only compile, into DIR")
    parser.add_argument("--prepared", type=Path, metavar="DIR", help="run what is in DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    return parser


def _check(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + 60 * options.minutes
    shapes = {name: _shape(name) for name in options.shape.split(",")}
    works = _works(options.works)
    if options.prepare is not None:
        _prepare(options.prepare, options.device, shapes, options.cases)
        return 0
    device = best_kind() if options.device == AUTO else options.device
    kind, _ = split_device(device)
    if kind == "cpu":
        raise BenchError("there is no GPU here; name a device: --device vulkan")
    print(f"device: {_description(device)}", flush=True)  # or why there is none
    with tempfile.TemporaryDirectory(prefix="everycast-gpu-check-") as temporary:
        folder = options.prepared or Path(temporary)
        if options.prepared is None:
            _prepare(folder, _target(device), shapes, options.cases)
        document = _read(folder, kind)
        results: Results = {"device": device, "numerics": [], "speed": {}}
        num_wrong = _numerics(folder, document["cases"], device, results)
        machine = run.measure_limits(folder, device, document["read_bytes"], document["operations"])
        print(
            f"\nmeasured: reads {machine.bytes_per_s / 1e9:.1f} GB/s, float32 multiply-adds "
            f"{machine.operations_per_s / 1e12:.2f} Tflop/s",
            flush=True,
        )
        if (peak := matrix_peak(kind, print)) is not None:
            print(f"measured: torch multiplies float16 matrices at {peak / 1e12:.1f} Tflop/s")
            machine = replace(machine, operations_per_s=peak)
        chosen = [name for name in document["shapes"] if name in shapes]
        for name in chosen:
            num_wrong += _speed(folder, name, device, works, machine, deadline, results)
        for name in chosen:
            _peers(name, shapes[name], kind, works, deadline, results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))
    print(
        f"\n{num_wrong} of {len(results['numerics'])} steps wrong" if num_wrong else "\nall right"
    )
    return 1 if num_wrong else 0


def _shape(name: str) -> Shape:
    return TINY if name == "tiny" else find_shape(name)


def _works(text: str) -> list[str]:
    names = text.split(",")
    try:
        works = [parse_work(name) for name in names]
    except ValueError as error:
        raise BenchError(str(error)) from None
    for work in works:
        if work.kind not in ("decode", "prefill", "batch") or work.is_beside_others:
            raise BenchError(
                f"{work.name} is no work of this check; choose decode, decode_N, prefill_N, batch_N"
            )
    return names


def _target(device: str) -> str:
    """What to compile for on the machine of the device: its own architecture alone."""
    memory = DeviceMemory(device)
    arch = memory.architecture()
    return f"{memory.kind}:{arch}" if arch else memory.kind


def _description(device: str) -> str:
    info = DeviceMemory(device).info()
    memory = f"{info.total_bytes / 1e9:.1f} GB" if info.total_bytes else ""
    parts = (info.label, info.driver, memory, *info.features)
    return ", ".join(part for part in parts if part)


def _prepare(folder: Path, target: str, shapes: Mapping[str, Shape], num_cases: int) -> None:
    try:
        from .gpu_check_prepare import prepare
    except ImportError as error:
        raise BenchError(
            f"the compiler is not installed here ({error}); prepare on another machine "
            "(--prepare DIR), and run with --prepared DIR"
        ) from None
    start = time.monotonic()
    prepare(folder, target, shapes, num_cases)
    print(f"compiled for {target} in {time.monotonic() - start:.0f} s", flush=True)


def _read(folder: Path, kind: str) -> dict[str, Any]:
    """What was prepared. Raises BenchError if nothing was, or for another kind of device."""
    try:
        document: dict[str, Any] = json.loads((folder / CHECK_JSON).read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"{folder} holds no prepared check: {error}") from None
    if document["target"].partition(":")[0] != kind:
        raise BenchError(
            f"{folder} was prepared for {document['target']}, not for {kind}; prepare it again "
            f"with --device {kind} --prepare DIR"
        )
    return document


def _numerics(folder: Path, cases: list[str], device: str, results: Results) -> int:
    num_wrong = 0
    for case in cases:
        for checked in run.check_numerics(folder, case, device):
            results["numerics"].append(asdict(checked))
            num_wrong += not checked.is_right
            verdict = "ok   " if checked.is_right else "WRONG"
            print(f"{verdict} {case:24} {checked.step:34} error {checked.error:.1e}", flush=True)
    return num_wrong


def _speed(
    folder: Path, shape: str, device: str, works: list[str], machine: Machine, deadline: float,
    results: Results,
) -> bool:  # fmt: skip
    """Whether the model failed; one that the device has no room for is left out."""
    print(f"\n{shape}, q4f16_1, random weights", flush=True)
    try:
        for speed in run.measure_shape(folder, shape, device, works, machine, deadline, print):
            results["speed"][f"{shape}/everycast/{speed.work}"] = asdict(speed)
            print(
                f"  everycast  {speed.work:12} {speed.tokens_per_s:10.1f} tokens/s  "
                f"{speed.percent:5.1f} % of what {speed.bound} allow",
                flush=True,
            )
    except CapacityError as error:
        print(f"  left out: {error}", flush=True)
    except EverycastError as error:
        print(f"  FAILED: {error}", flush=True)
        return True
    return False


def _peers(
    shape: str, sizes: Shape, kind: str, works: list[str], deadline: float, results: Results
) -> None:
    for peer in PEERS:
        for name, tokens_per_s in measure_peer(peer, sizes, kind, works, deadline, print):
            results["speed"][f"{shape}/{peer.name}/{name}"] = {"tokens_per_s": tokens_per_s}
            print(f"  {peer.name:10} {name:12} {tokens_per_s:10.1f} tokens/s  {shape}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
