"""Programs under measurement: child processes that do one piece of work when told, else sleep.

A worker prints one line of JSON when it is ready, then answers each line of its standard input (the
name of a work) with one line of JSON. Several can so be measured in turns, on a machine of which
each has all for the time of its turn.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

REST_S = 0.1
"""Time for the other workers' threads to fall asleep: thread pools spin for a while after work."""


class WorkerError(Exception):
    """A worker ended, or did not start. One line."""


class Worker:
    """A running worker; `ready` is what it said of itself."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, **(environment or {})},
        )
        self.ready = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._close()

    def measure(self, work: str) -> dict[str, Any]:
        """Let the worker do `work` alone; its answer."""
        assert self._process.stdin is not None
        time.sleep(REST_S)
        self._process.stdin.write(f"{work}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._close()
        raise WorkerError(f"{self.name} ended with exit code {self._process.returncode}")

    def _close(self) -> None:
        """Close the pipes and wait for the end."""
        with self._process:
            pass
