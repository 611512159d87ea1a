"""Carries updates from the loop's thread to a thread that waits for them."""

import queue
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Self

from ..artifact.errors import EverycastError
from .answers import Answer, ChunkT, Prepared, RequestT, WholeT
from .text_engine import RunningRequest, TextEngine
from .text_sink import RequestUpdate


def wait_for_answer(
    engine: TextEngine, prepared: Prepared[RequestT], answer: Answer[RequestT, WholeT, ChunkT]
) -> WholeT:
    """The whole response; leaving early, as by Ctrl-C, aborts the request."""
    updates: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
    run = Run(engine, prepared, updates.put)
    received = []
    try:
        while not run.is_complete:
            received.append(run.check(updates.get()))
    finally:
        run.close()
    return answer.whole(received)


class Stream(Generic[ChunkT]):
    """Chunks of one response as they come. Leaving it (`break`, `close`, `del`, Ctrl-C) aborts
    the request; `with` makes that certain where objects are not freed at once.

    Iterating raises EverycastError if the engine fails on the request.
    """

    def __init__(
        self,
        engine: TextEngine,
        prepared: Prepared[RequestT],
        answer: Answer[RequestT, Any, ChunkT],
    ) -> None:
        self._updates: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
        self._chunks = Chunks(answer, prepared)
        self._run = Run(engine, prepared, self._updates.put)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ChunkT:
        try:
            while not self._chunks.ready:
                if self._run.is_over:
                    raise StopIteration
                self._chunks.add(self._run.check(self._updates.get()), self._run)
        except BaseException:
            self.close()
            raise
        return self._chunks.ready.popleft()

    def close(self) -> None:
        """Abort the request if it is not complete."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Absent if the constructor raised.
        if hasattr(self, "_run"):
            self.close()


class Run:
    """A request that was put in line: knows when it is complete, and aborts it if left early."""

    def __init__(
        self, engine: TextEngine, prepared: Prepared[Any], emit: Callable[[RequestUpdate], None]
    ) -> None:
        self._engine = engine
        self._num_prompts_left = len(prepared.prompts)
        self._is_closed = False
        self._running: RunningRequest = engine.start(prepared, emit)

    @property
    def is_complete(self) -> bool:
        return self._num_prompts_left == 0

    @property
    def is_over(self) -> bool:
        return self.is_complete or self._is_closed

    def check(self, update: RequestUpdate) -> RequestUpdate:
        """Take note of an update. Raises EverycastError if the engine failed on the request."""
        self._num_prompts_left -= update.is_finished
        if update.error is None:
            return update
        if isinstance(update.error, EverycastError):
            raise update.error
        raise EverycastError(f"the engine failed on this request: {update.error}") from update.error

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._engine.finish(self._running, is_complete=self.is_complete)


class Chunks(Generic[ChunkT]):
    """Chunks that are built and not taken yet."""

    def __init__(self, answer: Answer[Any, Any, ChunkT], prepared: Prepared[Any]) -> None:
        self.ready: deque[ChunkT] = deque()
        self._answer = answer
        self._includes_usage = prepared.request.includes_usage

    def add(self, update: RequestUpdate, run: Run) -> None:
        self.ready.extend(self._answer.chunks(update))
        if run.is_complete and self._includes_usage:
            self.ready.append(self._answer.usage_chunk())
