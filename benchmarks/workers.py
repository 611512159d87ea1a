"""Programs under measurement: child processes that do one piece of work when told, else sleep.

A worker prints one line of JSON when it is ready, then answers each line of its standard input (the
name of a work) with one line of JSON. Several can so be measured in turns, on a machine of which
each has all for the time of its turn.
"""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ..artifact.errors import EverycastError

REST_S = 0.1
"""Time for the other workers' threads to fall asleep: thread pools spin for a while after work."""
ANSWER_TIMEOUT_S = 900.0
_END_TIMEOUT_S = 10.0
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")
"""What Linux counts of them; older versions have fewer of these."""
_REASON = re.compile(r"error|assert|cannot|failed", re.IGNORECASE)


class BenchError(EverycastError):
    """A measurement cannot be made as asked. One line."""


class WorkerError(BenchError):
    """A worker ended, or did not start."""


class WorkRefusedError(BenchError):
    """The worker lives but could not do this work."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a process: the most that was ever resident, and now with shared pages divided
    among those who share them; and what of it now lies on huge pages."""

    peak_rss: int
    pss: int
    on_huge_pages: int


class Worker:
    """A running worker; `ready` is what it said of itself."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        """Raises WorkerError if it cannot be started or ends before it is ready."""
        self.name = name
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, **(environment or {})},
                process_group=0,  # the terminal's Ctrl-C is for us alone; see __exit__
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{name} cannot be started: {error}") from None
        try:
            self.ready = self._answer()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def measure(self, work: str, *, rest_s: float = REST_S) -> dict[str, Any]:
        """Let the worker do `work` alone; its answer.

        Raises WorkRefusedError if it says that it cannot, WorkerError if it ends.
        """
        assert self._process.stdin is not None
        time.sleep(rest_s)
        with contextlib.suppress(BrokenPipeError):  # it has ended: the missing answer says so
            self._process.stdin.write(f"{work}\n")
            self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise WorkRefusedError(f"{self.name} cannot do {work}: {answer['error']}")
        return answer

    def memory(self) -> Memory:
        """What its process takes (Linux). Raises WorkRefusedError where that cannot be told."""
        folder = Path("/proc") / str(self._process.pid)
        try:
            status = (folder / "status").read_text()
            rollup = (folder / "smaps_rollup").read_text()
            huge = sum(_kilobytes(rollup, key) for key in _HUGE if f"{key}:" in rollup)
            return Memory(_kilobytes(status, "VmHWM"), _kilobytes(rollup, "Pss"), huge)
        except (OSError, LookupError) as error:
            raise WorkRefusedError(
                f"memory of {self.name} cannot be read on this system: {error}"
            ) from None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._process.kill()

        watchdog = threading.Timer(self._timeout_s, give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        finally:
            watchdog.cancel()
        code = self._process.wait()
        late = f"did not answer within {self._timeout_s:.0f} s"
        why = late if is_late.is_set() else _ended(code)
        raise WorkerError(f"{self.name} {why}{complaint(self._log)}")

    def _end(self) -> None:
        """End the process, close the pipes."""
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:
            pass
        self._log.close()


def _ended(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"


def complaint(log: IO[bytes]) -> str:
    """`: …`, the last line on standard error that looks like the reason, else the last one."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - (64 << 10)))
    lines = log.read().decode(errors="replace").strip().splitlines()
    reasons = [line for line in lines if _REASON.search(line) and not line.startswith("#")]
    return "".join(f": {line.strip()[:300]}" for line in (reasons or lines)[-1:])


def _kilobytes(text: str, key: str) -> int:
    """Bytes that a line `key:  N kB` of /proc says."""
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(values[key].split()[0]) * 1024
