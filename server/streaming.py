"""Answers that end early when the client leaves: one JSON body, or server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import describe

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientLeft(Exception):
    """The connection was closed before the answer was complete."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; when the client leaves first, `work` is cancelled and waited for.

    The body must have been read: whatever arrives now can only be the end of the connection.
    Raises ClientLeft.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: str) -> bytes:
    return b"data: " + data.encode() + b"\n\n"


class EventStream(Response):
    """`first` (already made, so that early errors have their own status), then the rest, which is
    closed at the end, also when the client leaves: that aborts the request.

    An error on the way becomes a last event with an OpenAI error body; then no `[DONE]` follows.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, rest: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # the base class counted an empty body
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            # When the client has left nobody is there to be told.
            with suppress(ClientLeft):
                await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = DONE
        try:
            await _send_part(send, event(self._first))
            async for chunk in self._rest:
                await _send_part(send, event(chunk))
        except Exception as error:
            last = event(json.dumps(describe(error)[1]))
        await _send_part(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
