"""Carries updates from the loop's thread to an event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Self
from weakref import WeakKeyDictionary

from .answers import Answer, ChunkT, Prepared, RequestT, WholeT
from .streams import Chunks, Run
from .text_engine import TextEngine
from .text_sink import RequestUpdate

Updates = asyncio.Queue[RequestUpdate]


async def gather_answer(
    engine: TextEngine, prepared: Prepared[RequestT], answer: Answer[RequestT, WholeT, ChunkT]
) -> WholeT:
    """The whole response; cancelling aborts the request."""
    updates = Updates()
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
        self._updates = Updates()
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


class _Outbox:
    """Updates on their way to the queues of one event loop.

    A step has news for many requests at once, and waking the event loop costs more than all else
    about an update: the first wakes it, and those that follow before it looks go along.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[Updates, RequestUpdate]] = deque()
        self._is_due = False
        """Whether the event loop was woken and has not looked yet."""

    def put(
        self, event_loop: asyncio.AbstractEventLoop, updates: Updates, update: RequestUpdate
    ) -> None:
        """From any thread. Raises RuntimeError if the event loop is closed."""
        self._items.append((updates, update))
        if self._is_due:
            return
        self._is_due = True
        try:
            event_loop.call_soon_threadsafe(self._empty)
        except RuntimeError:
            self._is_due = False
            raise

    def _empty(self) -> None:
        # Before the first look: what comes after the last one must wake the event loop again.
        self._is_due = False
        while self._items:
            updates, update = self._items.popleft()
            updates.put_nowait(update)


_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Outbox] = WeakKeyDictionary()


def _to_event_loop(updates: Updates) -> Callable[[RequestUpdate], None]:
    """A function for other threads that puts an update into a queue of the running event loop."""
    event_loop = asyncio.get_running_loop()
    outbox = _outboxes.setdefault(event_loop, _Outbox())
    return lambda update: outbox.put(event_loop, updates, update)
