"""Many requests that come and go on a Vulkan device."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from everycast.artifact.errors import CapacityError
from everycast.engine.async_mlc_engine import AsyncMLCEngine
from everycast.engine.engine_config import EngineConfig
from everycast.engine.loader import open_artifact
from everycast.engine.tvm_runtime import tvm_ffi

NUM_REQUESTS = 500
CONFIG = EngineConfig(
    mode="server",
    max_num_sequence=32,
    max_total_seq_length=512,
    prefill_chunk_size=64,
)


def requests() -> list[dict[str, Any]]:
    """A third of them begin with the same 20 tokens."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 300) for _ in range(20)]
    return [
        {
            "prompt": (shared if i % 3 == 0 else []) + rng.choices(range(3, 300), k=1 + i % 19),
            "max_tokens": rng.randint(1, 16),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for i in range(NUM_REQUESTS)
    ]


def bytes_on_device() -> tuple[int, int]:
    """Taken by tensors, and from the device."""
    counters = dict(tvm_ffi.get_global_func("everycast.vulkan.counters")(0))
    return int(counters["bytes_used"]), int(counters["bytes_allocated"])


@pytest.fixture(scope="module")
def engine(built_vulkan: Path) -> Iterator[AsyncMLCEngine]:
    parts = open_artifact(built_vulkan, "vulkan", engine_config=CONFIG).load()
    engine = AsyncMLCEngine.from_parts(*parts)
    yield engine
    engine.terminate()


Ids = list[int]


async def alone(engine: AsyncMLCEngine) -> list[tuple[str, Ids]]:
    answers = [await engine.completions.create(**request) for request in requests()]
    return [(answer.choices[0].text, answer.choices[0].token_ids or []) for answer in answers]


async def together(engine: AsyncMLCEngine, seed: int) -> list[tuple[str, Ids] | None]:
    """All at once; two of five leave after a random number of tokens, or before the first: None."""
    rng = random.Random(seed)
    leaves = [
        rng.randint(0, request["max_tokens"]) if rng.random() < 0.4 else None
        for request in requests()
    ]

    async def one(request: dict[str, Any], leave_after: int | None) -> tuple[str, Ids] | None:
        stream = await engine.completions.create(**request, stream=True)
        text, ids = "", []
        async with stream:
            if leave_after == 0:
                return None
            async for chunk in stream:
                text += chunk.choices[0].text
                ids += chunk.choices[0].token_ids or []
                if leave_after is not None and len(ids) >= leave_after:
                    return None
        return text, ids

    answers = await asyncio.gather(*map(one, requests(), leaves))
    async with asyncio.timeout(30):
        while engine.metrics().num_running_sequences + engine.metrics().num_waiting_sequences:
            await asyncio.sleep(0.01)
    return answers


def test_500_requests_of_which_many_leave(engine: AsyncMLCEngine) -> None:
    """The others get what they get alone, and the device's memory stays what it was."""
    expected = asyncio.run(alone(engine))
    asyncio.run(together(engine, 0))  # the largest batches have been there
    before = bytes_on_device()
    answers = asyncio.run(together(engine, 1))
    kept = [i for i, answer in enumerate(answers) if answer is not None]
    assert 250 < len(kept) < 350
    assert [answers[i] for i in kept] == [expected[i] for i in kept]
    assert bytes_on_device() == before
    metrics = engine.metrics()
    assert metrics.num_prefix_hit_tokens > 0
    assert metrics.counters.num_aborted_requests > 200  # some had ended when they left
    assert metrics.num_available_pages == metrics.num_pages == 32


def test_an_engine_gives_its_memory_back(built_vulkan: Path) -> None:
    def turn() -> int:
        loop, tokenizer, description = open_artifact(built_vulkan, "vulkan").load()
        engine = AsyncMLCEngine.from_parts(loop, tokenizer, description)
        answer = asyncio.run(engine.completions.create(**requests()[0]))
        assert answer.choices[0].token_ids
        engine.terminate()
        return bytes_on_device()[0]

    turn()
    assert len({turn() for _ in range(3)}) == 1


def test_more_pages_than_the_device_has_room_for(built_vulkan: Path) -> None:
    before = bytes_on_device()
    with pytest.raises(CapacityError) as caught:
        open_artifact(built_vulkan, "vulkan", engine_config={"max_total_seq_length": 10**11})
    text = str(caught.value)
    assert "100000000000 tokens" in text and "lower max_total_seq_length" in text
    assert "\n" not in text and bytes_on_device() == before
