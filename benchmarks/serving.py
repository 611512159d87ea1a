"""Servers under load: child processes on loopback, ended when the measurement is over."""

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Self

from .loadgen import (
    HOST,
    TIMEOUT_S,
    Exchange,
    closed_loop,
    open_loop,
    poisson_arrivals,
    request_body,
    summary,
)  # fmt: skip
from .workers import BenchError, WorkerError, complaint
from .works import Work, random_prompt

START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 20.0
REQUESTS_PER_CLIENT = 2
VOCABULARY = 30_000
"""Prompts take token ids below this, which every model here has; the highest are often special."""


class Server:
    """A server that answers; a context manager."""

    def __init__(
        self, name: str, command: Callable[[int], Sequence[str]], environment: Mapping[str, str]
    ) -> None:
        """command: what starts it on a port. Raises WorkerError if it ends or does not answer."""
        self.name = name
        self.port = _free_port()
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                list(command(self.port)),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **environment},
                process_group=0,
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{name}'s server cannot be started: {error}") from None
        try:
            self._wait()
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

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                why = complaint(self._log)
                code = self._process.returncode
                raise WorkerError(f"{self.name}'s server ended with exit code {code}{why}")
            with contextlib.suppress(OSError):
                with opener.open(f"http://{HOST}:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            time.sleep(0.1)
        raise WorkerError(f"{self.name}'s server did not answer within {START_TIMEOUT_S:.0f} s")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class ServedEngine:
    """A server that is put under load for each figure."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._num_requests = 0

    def figure(self, work: Work) -> tuple[float, dict[str, float]]:
        """Tokens a second and latencies. The very first load is not timed."""
        if not self._num_requests:
            self._load(work)
        return summary(self._load(work))

    def _load(self, work: Work) -> list[Exchange]:
        port = self._server.port
        if work.rate is not None:
            arrivals = poisson_arrivals(work.rate, work.streams, seed=0)
            bodies = [self._body(work) for _ in arrivals]
            return self._run(lambda: open_loop(port, bodies, arrivals))
        clients = [
            [self._body(work) for _ in range(REQUESTS_PER_CLIENT)] for _ in range(work.streams)
        ]
        return self._run(lambda: closed_loop(port, clients))

    def _body(self, work: Work) -> dict[str, object]:
        self._num_requests += 1
        prompt = random_prompt(work, VOCABULARY, self._num_requests)
        return request_body(prompt, work.timed_tokens)

    def _run(self, load: Callable[[], Coroutine[None, None, list[Exchange]]]) -> list[Exchange]:
        async def bounded() -> list[Exchange]:
            async with asyncio.timeout(TIMEOUT_S):
                return await load()

        name = self._server.name
        try:
            return asyncio.run(bounded())
        except TimeoutError:
            raise BenchError(f"{name}'s server did not finish in {TIMEOUT_S:.0f} s") from None
        except (OSError, ValueError) as error:
            raise BenchError(f"{name}'s server broke off: {error}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
