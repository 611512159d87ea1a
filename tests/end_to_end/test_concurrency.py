"""Many requests at once on a compiled model with far too few pages."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from everycast.engine.async_mlc_engine import AsyncMLCEngine
from everycast.engine.engine_config import EngineConfig
from everycast.engine.loader import open_artifact
from everycast.engine.loop import EngineLoop
from everycast.engine.mlc_engine import MLCEngine

NUM_REQUESTS = 64
CONFIG = EngineConfig(
    mode="server",
    max_num_sequence=16,
    max_total_seq_length=512,  # 32 pages for 16 sequences of up to 10: they preempt each other
    prefill_chunk_size=48,
)


def requests() -> list[dict[str, Any]]:
    """Half of them begin with the same 40 tokens."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 300) for _ in range(40)]
    return [
        {
            "prompt": (shared if i % 2 else []) + rng.choices(range(3, 300), k=rng.randint(1, 30)),
            "max_tokens": rng.randint(8, 80),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for i in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def alone(built: Any) -> list[tuple[str, list[int]]]:
    """Text and ids of each request with nothing else in the engine."""
    with MLCEngine(built.folder, engine_config={"prefix_cache_mode": "disable"}) as engine:
        choices = [engine.completions.create(**request).choices[0] for request in requests()]
        assert engine.metrics().num_cached_pages == 0
    return [(choice.text, choice.token_ids or []) for choice in choices]


@contextmanager
def engine_and_loop(folder: Any) -> Iterator[tuple[AsyncMLCEngine, EngineLoop]]:
    loop, tokenizer, description = open_artifact(folder, engine_config=CONFIG).load()
    engine = AsyncMLCEngine.from_parts(loop, tokenizer, description)
    try:
        yield engine, loop
    finally:
        engine.terminate()


def check_pages(engine: AsyncMLCEngine, loop: EngineLoop) -> None:
    """Nothing is owned; idle pages hold prefixes, and are free pages again once these go."""
    metrics = engine.metrics()
    assert metrics.num_running_sequences == metrics.num_waiting_sequences == 0
    assert metrics.num_available_pages == metrics.num_pages == 32
    assert metrics.num_cached_pages > 0
    loop.scheduler.prefix_cache.clear()
    assert engine.metrics().num_cached_pages == 0
    assert engine.metrics().num_available_pages == 32


def test_64_requests_get_the_texts_they_get_alone(
    built: Any, alone: list[tuple[str, list[int]]]
) -> None:
    async def main(engine: AsyncMLCEngine) -> list[tuple[str, list[int]]]:
        answers = await asyncio.gather(*(engine.completions.create(**r) for r in requests()))
        return [(a.choices[0].text, a.choices[0].token_ids or []) for a in answers]

    with engine_and_loop(built.folder) as (engine, loop):
        assert asyncio.run(main(engine)) == alone
        metrics = engine.metrics()
        assert metrics.counters.num_finished_requests == NUM_REQUESTS
        assert metrics.num_preemptions > 0 and metrics.num_prefix_hit_tokens > 0
        check_pages(engine, loop)


def test_half_of_64_requests_leave(built: Any, alone: list[tuple[str, list[int]]]) -> None:
    """Case 19: at random times, the step in which they end included; the others do not notice."""

    async def one(engine: AsyncMLCEngine, i: int) -> tuple[str, list[int]] | None:
        request = requests()[i]
        leave_after = random.Random(i).randint(1, request["max_tokens"])
        stream = await engine.completions.create(**request, stream=True)
        text, ids = "", []
        async with stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                ids += chunk.choices[0].token_ids or []
                if i % 2 == 0 and len(ids) >= leave_after:
                    return None
        return text, ids

    async def main(engine: AsyncMLCEngine) -> None:
        answers = await asyncio.gather(*(one(engine, i) for i in range(NUM_REQUESTS)))
        assert answers[1::2] == alone[1::2]
        assert answers[0::2] == [None] * (NUM_REQUESTS // 2)
        async with asyncio.timeout(30):
            while engine.metrics().num_running_sequences:
                await asyncio.sleep(0.01)

    with engine_and_loop(built.folder) as (engine, loop):
        asyncio.run(main(engine))
        check_pages(engine, loop)
