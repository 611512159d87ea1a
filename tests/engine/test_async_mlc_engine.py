"""The asynchronous engine over a scripted model."""

import asyncio

import pytest
from everycast import AsyncMLCEngine
from everycast.artifact.errors import RequestError
from everycast.engine.model_description import ModelDescription
from everycast.engine.scripted_model import hash_script
from scripted_engines import MESSAGES, TEXT, Parts, make_loop, wait_until_idle


def test_async_answers_and_streams(parts: Parts) -> None:
    async def main() -> None:
        async with AsyncMLCEngine.from_parts(*parts.parts(TEXT)) as engine:
            answer = await engine.chat.completions.create(messages=MESSAGES)
            assert answer.choices[0].message.content == TEXT
            stream = await engine.chat.completions.create(messages=MESSAGES, stream=True)
            contents = [chunk.choices[0].delta.content async for chunk in stream]
            assert contents == [*TEXT, None]
            completion = await engine.completions.create(prompt=["a\n", "b\n"])
            assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
            with pytest.raises(RequestError, match="max_tokens"):
                await engine.completions.create(prompt="a\n", max_tokens=-1)
            # The pieces of several streams come while others are read.
            async with await engine.completions.create(prompt="a\n", stream=True) as text_stream:
                async for chunk in text_stream:
                    assert chunk.choices[0].text == TEXT[0]
                    break
            await asyncio.to_thread(wait_until_idle, engine)

    asyncio.run(main())


def test_async_leaving_early_frees_pages(parts: Parts) -> None:
    async def main() -> None:
        engine = AsyncMLCEngine.from_parts(*parts.parts("a" * 90, step_time_s=0.002))
        async for _ in await engine.completions.create(prompt="a\n", stream=True):
            break
        await asyncio.to_thread(wait_until_idle, engine)

        async def read() -> None:
            async for _ in await engine.completions.create(prompt="a\n", stream=True):
                pass

        for work in (read(), engine.completions.create(prompt="a\n")):
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until_idle, engine)
        assert engine.metrics().counters.num_aborted_requests == 3
        engine.terminate()

    asyncio.run(main())


def test_abort_storm(parts: Parts) -> None:
    """64 requests at once, half of them left at different times: the others are as if alone."""
    num_requests = 64

    async def main() -> None:
        loop = make_loop(parts.tokenizer, hash_script(parts.tokenizer.size))
        async with AsyncMLCEngine.from_parts(
            loop, parts.tokenizer, ModelDescription("m")
        ) as engine:

            async def run(i: int) -> list[int] | None:
                stream = await engine.completions.create(
                    prompt=[i + 1, i + 2],
                    max_tokens=40,
                    ignore_eos=True,
                    stream=True,
                    return_token_ids=True,
                )
                ids: list[int] = []
                async for chunk in stream:
                    ids += chunk.choices[0].token_ids or []
                    if i % 2 and len(ids) >= i // 2 + 8:
                        return None
                return ids

            alone = [await run(i) for i in range(0, 8, 2)]
            together = await asyncio.gather(*(run(i) for i in range(num_requests)))
            assert [together[i] for i in range(0, 8, 2)] == alone
            assert [len(ids or ()) for ids in together[::2]] == [40] * (num_requests // 2)
            assert together[1::2] == [None] * (num_requests // 2)
            await asyncio.to_thread(wait_until_idle, engine)

    asyncio.run(main())
