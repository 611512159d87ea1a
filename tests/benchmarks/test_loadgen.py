"""Arrivals, percentiles, and clients against a scripted server on loopback."""

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from everycast.benchmarks.loadgen import (
    HOST,
    Exchange,
    closed_loop,
    exchange,
    open_loop,
    percentile,
    poisson_arrivals,
    request_body,
    summary,
)
from everycast.benchmarks.serving import ServedEngine, Server
from everycast.benchmarks.workers import BenchError, WorkerError
from everycast.benchmarks.works import parse_work
from hypothesis import given
from hypothesis import strategies as st

FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = np.percentile(values, percent)
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 9))
def test_arrivals_grow_and_repeat(rate: int, count: int, seed: int) -> None:
    times = poisson_arrivals(rate, count, seed)
    assert len(times) == count
    assert all(a < b for a, b in itertools.pairwise([0.0, *times]))
    assert times == poisson_arrivals(rate, count, seed)


def test_arrivals_come_at_their_rate_with_exponential_gaps() -> None:
    gaps = np.diff(poisson_arrivals(4, 20_000, 0))
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.05)  # of an exponential: mean and deviation
    assert poisson_arrivals(4, 5, 0) != poisson_arrivals(4, 5, 1)


def test_summary_of_two_requests() -> None:
    exchanges = [Exchange(0.0, [1.0, 1.5, 2.5], 3), Exchange(1.0, [3.0, 4.0], 4)]
    rate, details = summary(exchanges)
    assert rate == 7 / 4
    assert (details["ttft_ms_p50"], details["ttft_ms_p99"]) == (1500, pytest.approx(1990))
    assert details["inter_token_ms_p50"] == 1000
    assert details["texts_per_token"] == pytest.approx((1 + 0.5) / 2)


def test_summary_of_single_texts() -> None:
    assert summary([Exchange(0.0, [0.5], 1)])[1]["inter_token_ms_p99"] == 0


class ScriptedServer:
    """Answers each request with as many texts as it asks tokens."""

    def __init__(self, *, status: str = "200 OK", end: str = "") -> None:
        self.status, self.end = status, end
        self.bodies: list[dict[str, Any]] = []
        self.num_open = self.most_open = 0
        self.tasks: list[asyncio.Task[None]] = []

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.create_task(self.serve(reader, writer)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the client may leave
            await self.answer(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split()[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        writer.write(f"HTTP/1.1 {self.status}\r\nContent-Type: text/event-stream\r\n\r\n".encode())
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0.001)
            event = {"choices": [{"text": "x"}], "usage": None}
            writer.write(f"data: {json.dumps(event)}\n\n".encode())
        writer.write(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n')
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        writer.write((self.end or f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n").encode())
        self.num_open -= 1
        await writer.drain()


def against(server: ScriptedServer, load: Any) -> Any:
    """What `load(port)` gives while the server runs."""

    async def run() -> Any:
        listening = await asyncio.start_server(server.connected, HOST, 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            work: Coroutine[Any, Any, Any] = load(port)
            try:
                return await asyncio.wait_for(work, 20)
            finally:
                await asyncio.gather(*server.tasks)

    return asyncio.run(run())


def test_one_exchange() -> None:
    server = ScriptedServer()
    result = against(server, lambda port: exchange(port, request_body([1, 2], 5)))
    assert result.num_tokens == 5 and len(result.events) == 5
    assert result.sent < result.events[0] < result.events[-1]
    (body,) = server.bodies
    assert body["prompt"] == [1, 2] and body["ignore_eos"] and body["stream"]


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (ScriptedServer(status="429 Too Many Requests"), "429 Too Many Requests"),
        (ScriptedServer(end="data: [DONE]\n\n"), "did not say how many tokens"),
        (ScriptedServer(end='data: {"error": "out of pages"}\n\n'), "out of pages"),
    ],
)
def test_a_wrong_answer_is_an_error(server: ScriptedServer, reason: str) -> None:
    with pytest.raises(BenchError, match=reason):
        against(server, lambda port: exchange(port, request_body([1], 2)))


def test_clients_send_their_requests_one_after_the_other() -> None:
    server = ScriptedServer()
    bodies = [[request_body([client, i], 4) for i in range(3)] for client in range(4)]
    results = against(server, lambda port: closed_loop(port, bodies))
    assert len(results) == 12 and server.most_open == 4
    for client in range(4):
        own = [body["prompt"][1] for body in server.bodies if body["prompt"][0] == client]
        assert own == [0, 1, 2]


def test_arrivals_wait_for_nobody() -> None:
    server = ScriptedServer()
    bodies = [request_body([i], 20) for i in range(6)]
    results = against(server, lambda port: open_loop(port, bodies, [0.0] * 5 + [0.01]))
    assert len(results) == 6 and server.most_open >= 5


# A server of its own process

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200); self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        self.wfile.write(f"data: {json.dumps(usage)}\\n\\ndata: [DONE]\\n\\n".encode())
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_served_engine_under_load() -> None:
    with Server("s", lambda port: [sys.executable, "-c", SERVER, str(port)], {}) as server:
        engine = ServedEngine(server)
        rate, details = engine.figure(parse_work("serve_3"))
        assert rate > 0 and details["texts_per_token"] == 1
        rate, _ = engine.figure(parse_work("serve_rate_60"))
        assert rate > 0
    with pytest.raises(BenchError, match="s's server broke off"):
        engine.figure(parse_work("serve_3"))


def test_a_server_that_ends_is_named() -> None:
    script = "import sys; sys.exit('error: no such model')"
    with pytest.raises(WorkerError, match="s's server ended with exit code 1: error: no such mod"):
        Server("s", lambda port: [sys.executable, "-c", script], {})
