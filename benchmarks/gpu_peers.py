"""Other engines on the same GPU, where they are installed: each in a process of its own."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .shapes import Shape
from .workers import BenchError, Worker

PEAK = "peak"
"""A work of the worker of torch: products of large float16 matrices."""


@dataclass(frozen=True, slots=True)
class GpuPeer:
    """An engine, the package it comes with, and its worker beside this file. `kinds` are of
    devices; its weights are random, in float16."""

    name: str
    package: str
    worker: str
    kinds: tuple[str, ...]


TORCH = GpuPeer("torch", "torch", "worker_torch.py", ("cuda", "rocm"))
PEERS = (TORCH, GpuPeer("vllm", "vllm", "worker_vllm.py", ("cuda", "rocm")))


def measure_peer(
    peer: GpuPeer, shape: Shape, kind: str, works: list[str], deadline: float,
    note: Callable[[str], None],
) -> Iterator[tuple[str, float]]:  # fmt: skip
    """(work, tokens a second) of each work, as far as the time (`time.monotonic`) goes. Nothing
    where the peer is not installed or has no such device; what it cannot do is a note."""
    if kind not in peer.kinds or importlib.util.find_spec(peer.package) is None:
        return
    try:
        with start_worker(peer, shape, "cuda", deadline) as worker:
            for name in works:
                if time.monotonic() > deadline:
                    note(f"  {peer.name}: no time left for {name}")
                    continue
                answer = worker.measure(name)
                yield name, answer["tokens"] / answer["seconds"]
    except BenchError as error:
        note(f"  left out: {error}")


def matrix_peak(kind: str, note: Callable[[str], None]) -> float | None:
    """Float16 operations a second of torch's matrix products; None without torch."""
    if kind not in TORCH.kinds or importlib.util.find_spec(TORCH.package) is None:
        return None
    nothing = Shape("llama", 0, 32, 32, 1, 1, 32, 32, 1e4, True)
    try:
        with start_worker(TORCH, nothing, "cuda", time.monotonic() + 60) as worker:
            answer = worker.measure(PEAK)
    except BenchError as error:
        note(f"  left out: {error}")
        return None
    return float(answer["tokens"] / answer["seconds"])


def start_worker(peer: GpuPeer, shape: Shape, device: str, deadline: float) -> Worker:
    """The peer's worker for a shape. Raises BenchError if it does not start before the deadline."""
    script = Path(__file__).with_name(peer.worker)
    command = [sys.executable, str(script), json.dumps(asdict(shape)), device]
    return Worker(peer.name, command, timeout_s=max(1.0, deadline - time.monotonic()))
