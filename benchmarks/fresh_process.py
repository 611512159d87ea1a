"""Works for a process that has done nothing yet: its memory, and how soon the first token comes."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from .rounds import StartWorker
from .workers import BenchError, WorkerError
from .works import Work

_TIMEOUT_S = 300.0
MB = 1e6


class FreshWorker:
    """An engine whose worker is started for each figure and ended after it."""

    def __init__(self, start: StartWorker) -> None:
        self._start = start

    def figure(self, work: Work) -> tuple[float, dict[str, float]]:
        """`start`: seconds from the start of the process to the first token. `memory`: the most
        that was resident, in MB, after a prompt and some tokens."""
        begin = time.perf_counter()
        with self._start() as worker:
            worker.measure(work.name, rest_s=0.0)
            seconds = time.perf_counter() - begin
            if work.kind == "start":
                return seconds, {}
            memory = worker.memory()
        return memory.peak_rss / MB, {"pss_mb": memory.pss / MB}


class FreshCommand:
    """`start` of a command that writes the first token's text to standard output."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self._command = list(command)
        self._environment = environment

    def figure(self, work: Work) -> tuple[float, dict[str, float]]:
        """Seconds from the start of the process to the first byte."""
        begin = time.perf_counter()
        with subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self._environment},
        ) as process:
            try:
                assert process.stdout is not None
                first = process.stdout.read(1)
                seconds = time.perf_counter() - begin
                _, errors = process.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise WorkerError(f"{self._name} did not end within {_TIMEOUT_S:.0f} s") from None
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0 or not first:
            lines = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise BenchError(f"{self._name} wrote no token: {lines[-1]}")
        return seconds, {}
