"""Carries updates from the loop's thread to an event loop."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from .answers import Answer, ChunkT, Prepared, RequestT, WholeT
from .streams import Chunks, Run
from .text_engine import TextEngine
from .text_sink import RequestUpdate

UpdateT = TypeVar("UpdateT")


async def gather_answer(
    engine: TextEngine, prepared: Prepared[RequestT], answer: Answer[RequestT, WholeT, ChunkT]
) -> WholeT:
    """The whole response; cancelling aborts the request."""
    updates: asyncio.Queue[RequestUpdate] = asyncio.Queue()
    run = Run(engine, prepared, _to_event_loop(updates))
    received = []
    try:
        while not run.is_complete:
            received.append(run.check(await updates.get()))
    finally:
        run.close()
    return answer.whole(received)


class AsyncStream(Generic[ChunkT]):
    """As `Stream`, for `async for` and `async with`; cancelling the task that waits aborts."""

    def __init__(
        self,
        engine: TextEngine,
        prepared: Prepared[RequestT],
        answer: Answer[RequestT, Any, ChunkT],
    ) -> None:
        self._updates: asyncio.Queue[RequestUpdate] = asyncio.Queue()
        self._chunks = Chunks(answer, prepared)
        self._run = Run(engine, prepared, _to_event_loop(self._updates))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChunkT:
        try:
            while not self._chunks.ready:
                if self._run.is_over:
                    raise StopAsyncIteration
                self._chunks.add(self._run.check(await self._updates.get()), self._run)
        except BaseException:
            self._run.close()
            raise
        return self._chunks.ready.popleft()

    async def aclose(self) -> None:
        """Abort the request if it is not complete."""
        self._run.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._run.close()

    def __del__(self) -> None:
        # Absent if the constructor raised. Aborting neither waits nor needs the event loop.
        if hasattr(self, "_run"):
            self._run.close()


def _to_event_loop(updates: "asyncio.Queue[UpdateT]") -> Callable[[UpdateT], None]:
    """A function for other threads that puts an update into a queue of the running event loop."""
    event_loop = asyncio.get_running_loop()

    def emit(update: UpdateT) -> None:
        event_loop.call_soon_threadsafe(updates.put_nowait, update)

    return emit
