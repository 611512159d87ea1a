"""`AsyncMLCEngine`: the engine's public face for event loops, in OpenAI's form.

    async with AsyncMLCEngine("smollm2-135m") as engine:
        stream = await engine.chat.completions.create(messages=messages, stream=True)
        async for chunk in stream:
            print(chunk.choices[0].delta.content, end="")

It runs the same loop as `MLCEngine`. A stream that is left early, or whose task is cancelled,
aborts its request and frees its pages.
"""

import asyncio
from typing import Any, Literal, Self, overload

from .answers import ChatAnswer, CompletionAnswer
from .async_streams import AsyncStream, gather_answer
from .loop import EngineLoop
from .mlc_engine import Engine
from .model_description import ModelDescription
from .responses import ChatCompletion, ChatCompletionChunk, Completion
from .text_engine import TextEngine
from .tokenizer import Tokenizer


class AsyncMLCEngine(Engine):
    """Runs a model; calls are coroutines, streams async iterators, on any event loop."""

    def _set_up(
        self, loop: EngineLoop, tokenizer: Tokenizer, description: ModelDescription
    ) -> None:
        super()._set_up(loop, tokenizer, description)
        self.chat = AsyncChat(self._engine)
        self.completions = AsyncCompletions(self._engine)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # It waits for the step that is running.
        await asyncio.to_thread(self.terminate)


class AsyncChat:
    def __init__(self, engine: TextEngine) -> None:
        self.completions = AsyncChatCompletions(engine)


class AsyncChatCompletions:
    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine

    @overload
    async def create(
        self, *, stream: Literal[True], **request: Any
    ) -> AsyncStream[ChatCompletionChunk]: ...
    @overload
    async def create(
        self, *, stream: Literal[False] | None = None, **request: Any
    ) -> ChatCompletion: ...
    @overload
    async def create(
        self, *, stream: bool | None = None, **request: Any
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]: ...
    async def create(
        self, *, stream: bool | None = None, **request: Any
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]:
        """As `ChatCompletions.create`; cancelling the task aborts the request."""
        values = {**request, "stream": stream}
        # A long prompt takes long to encode: other requests go on meanwhile.
        prepared = await asyncio.to_thread(self._engine.prepare_chat, values)
        answer = ChatAnswer(prepared, self._engine.tokenizer)
        if stream:
            return AsyncStream(self._engine, prepared, answer)
        return await gather_answer(self._engine, prepared, answer)


class AsyncCompletions:
    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine

    @overload
    async def create(self, *, stream: Literal[True], **request: Any) -> AsyncStream[Completion]: ...
    @overload
    async def create(
        self, *, stream: Literal[False] | None = None, **request: Any
    ) -> Completion: ...
    @overload
    async def create(
        self, *, stream: bool | None = None, **request: Any
    ) -> Completion | AsyncStream[Completion]: ...
    async def create(
        self, *, stream: bool | None = None, **request: Any
    ) -> Completion | AsyncStream[Completion]:
        """As `Completions.create`; cancelling the task aborts the request."""
        values = {**request, "stream": stream}
        # A long prompt takes long to encode: other requests go on meanwhile.
        prepared = await asyncio.to_thread(self._engine.prepare_completion, values)
        answer = CompletionAnswer(prepared, self._engine.tokenizer)
        if stream:
            return AsyncStream(self._engine, prepared, answer)
        return await gather_answer(self._engine, prepared, answer)
