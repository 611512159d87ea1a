"""`everycast serve` as a process of its own, asked by OpenAI's client."""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from everycast import MLCEngine
from everycast.engine.responses import ChatCompletion

TIMEOUT_S = 60.0
MESSAGES: list[Any] = [{"role": "user", "content": "the 模型"}]
LONG: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@dataclass(frozen=True, slots=True)
class Serving:
    """A running `everycast serve`."""

    process: subprocess.Popen[str]
    url: str

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT_S).text
        lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("everycast_"): float(value) for name, value in lines}

    def wait_for(self, condition: Callable[[dict[str, float]], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(metrics := self.metrics()):
            assert time.monotonic() < deadline, metrics
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        """Nothing runs, and every page can be had again."""
        self.wait_for(lambda m: m["active_requests"] == m["running_sequences"] == 0)
        metrics = self.metrics()
        assert metrics["available_pages"] == metrics["pages"]


@contextmanager
def serving(command: Any, *arguments: str | Path) -> Iterator[Serving]:
    process = subprocess.Popen(
        [*command, "serve", *map(str, arguments), "--port", "0"],
        stderr=subprocess.PIPE, encoding="utf-8", env=dict(os.environ),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        seen = ""
        while (match := re.search(r"serving .* at (http://\S+)/v1", seen)) is None:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        assert "memory: weights" in seen
        yield Serving(process, match[1])
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def client() -> Iterator[Callable[[Serving], openai.OpenAI]]:
    made: list[openai.OpenAI] = []

    def make(server: Serving) -> openai.OpenAI:
        made.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_serve(
    tiny: Path, built: Any, command: Any, client: Callable[[Serving], openai.OpenAI]
) -> None:
    """The model's own folder, under its odd path (case 38): what `chat` built is found again."""
    with MLCEngine(built.folder) as engine:
        alone = engine.chat.completions.create(
            messages=MESSAGES, temperature=0, ignore_eos=True, max_tokens=60
        )
    with serving(command, tiny, "--max-total-seq-length", "1024") as server:
        assert [m.id for m in client(server).models.list()] == [built.folder.name]
        two_streams_at_once(server, client, alone)
        server.wait_until_idle()
        a_client_that_leaves(server)
        # Also over HTTP a fault is told in one body, and the next request runs.
        with pytest.raises(openai.BadRequestError, match=r"257.*256|256.*257"):
            client(server).completions.create(model=built.folder.name, prompt=[5] * 257)
        chat = client(server).chat.completions.create(
            model=tiny.name, messages=MESSAGES, temperature=0, max_tokens=8
        )
        assert chat.choices[0].message.content == built.answer["text"]
        server.process.send_signal(signal.SIGTERM)
        said_last = server.process.communicate(timeout=TIMEOUT_S)[1]
        assert "Traceback" not in said_last and "error" not in said_last.lower()
        assert server.process.returncode in (0, -signal.SIGTERM)


def two_streams_at_once(
    server: Serving, client: Callable[[Serving], openai.OpenAI], alone: ChatCompletion
) -> None:
    """Both have begun before either goes on, and both are the text that one alone gets."""
    meeting = threading.Barrier(2, timeout=TIMEOUT_S)
    texts: list[str] = []

    def chat() -> None:
        stream = client(server).chat.completions.create(
            model=alone.model, messages=MESSAGES, stream=True, max_tokens=60, **LONG
        )
        text = next(stream).choices[0].delta.content or ""
        meeting.wait()
        texts.append(text + "".join(chunk.choices[0].delta.content or "" for chunk in stream))

    threads = [threading.Thread(target=chat) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert texts == [alone.choices[0].message.content] * 2


def a_client_that_leaves(server: Serving) -> None:
    """Case 18: its connection closes after the first bytes of a long answer."""
    aborted = server.metrics()["aborted_requests_total"]
    host, port = server.url.removeprefix("http://").split(":")
    body = (
        b'{"messages": [{"role": "user", "content": "go"}], "stream": true, "n": 4,'
        b' "ignore_eos": true}'
    )
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
    server.wait_for(lambda m: m["aborted_requests_total"] == aborted + 1)
    server.wait_until_idle()
