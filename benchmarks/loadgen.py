"""Load on a server's streaming completions: clients that wait for each other's places, or arrivals
that wait for nobody. Loopback only, a fixed count of requests, an end in time.

One thread and asyncio: the clients must not take the cores from the server they measure.
"""

import asyncio
import contextlib
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .workers import BenchError

HOST = "127.0.0.1"
TIMEOUT_S = 180.0


@dataclass(slots=True)
class Exchange:
    """One request. Times in seconds of one clock."""

    sent: float
    events: list[float] = field(default_factory=list)
    """When each piece of text came."""
    num_tokens: int = 0
    """As the server counts them."""


def request_body(prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    """A completion that both servers understand: greedy, of exactly `max_tokens`, streamed."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def exchange(port: int, body: dict[str, object]) -> Exchange:
    """Send a completion and read its stream. Raises BenchError for any other answer."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    result = Exchange(time.perf_counter())
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(head.encode() + content)
        status = await reader.readline()
        if status.split()[1:2] != [b"200"]:
            raise BenchError(f"the server answered {status.decode(errors='replace').strip()!r}")
        async for line in reader:
            if line.startswith(b"data:"):
                _take(result, line[5:].strip(), time.perf_counter())
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if not result.events or not result.num_tokens:
        raise BenchError("the server streamed no text, or did not say how many tokens it was")
    return result


def _take(result: Exchange, data: bytes, now: float) -> None:
    if data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise BenchError(f"the server says {event['error']}")
    if event.get("usage"):
        result.num_tokens = event["usage"]["completion_tokens"]
    if any(choice.get("text") for choice in event.get("choices", [])):
        result.events.append(now)


async def closed_loop(port: int, bodies: Sequence[Sequence[dict[str, object]]]) -> list[Exchange]:
    """A client for each of `bodies`, which sends its requests one after the other."""

    async def client(requests: Sequence[dict[str, object]]) -> list[Exchange]:
        return [await exchange(port, body) for body in requests]

    clients = await asyncio.gather(*(client(requests) for requests in bodies))
    return [one for exchanges in clients for one in exchanges]


async def open_loop(
    port: int, bodies: Sequence[dict[str, object]], arrivals: Sequence[float]
) -> list[Exchange]:
    """Each request at its time, in seconds from now, whatever became of the others."""
    start = time.perf_counter()

    async def arrive(body: dict[str, object], after: float) -> Exchange:
        await asyncio.sleep(max(0.0, start + after - time.perf_counter()))
        return await exchange(port, body)

    pairs = zip(bodies, arrivals, strict=True)
    return list(await asyncio.gather(*(arrive(body, after) for body, after in pairs)))


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Times of `count` arrivals at `rate` a second, whose gaps are exponential."""
    generator = random.Random(f"arrivals {rate} {seed}")
    now, times = 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate)
        times.append(now)
    return times


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values, in proportion (as NumPy's `linear`); values not empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(exchanges: Sequence[Exchange]) -> tuple[float, dict[str, float]]:
    """Tokens a second from the first request to the last token, and latencies in ms: to the first
    text of a request, and between its texts."""
    begin = min(one.sent for one in exchanges)
    end = max(one.events[-1] for one in exchanges)
    first = [1e3 * (one.events[0] - one.sent) for one in exchanges]
    gaps = [
        1e3 * (b - a) for one in exchanges for a, b in zip(one.events, one.events[1:], strict=False)
    ] or [0.0]
    latencies = {
        f"{name}_ms_p{percent}": percentile(values, percent)
        for name, values in (("ttft", first), ("inter_token", gaps))
        for percent in (50, 90, 99)
    }
    texts = statistics.fmean(len(one.events) / one.num_tokens for one in exchanges)
    total = sum(one.num_tokens for one in exchanges)
    return total / (end - begin), {**latencies, "texts_per_token": texts}
