"""OpenAI's routes over an `AsyncMLCEngine`."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from ..artifact.errors import CapacityError, DeviceError, RequestError
from .body import read_json
from .errors import HTTPError
from .metrics import CONTENT_TYPE, prometheus_text
from .streaming import ClientLeft, EventStream, unless_disconnected

if TYPE_CHECKING:
    from ..engine.async_mlc_engine import AsyncMLCEngine
    from ..engine.async_streams import AsyncStream

CLIENT_CLOSED_REQUEST = 499
"""What logs call an answer that nobody waited for (nginx's number; no client sees it)."""

Create = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    max_requests: int = 256
    """Most requests at once, waiting ones included; the next one gets 429."""
    max_body_bytes: int = 16 * 2**20


class Service:
    """The engine as the routes see it. All methods run on one event loop."""

    def __init__(self, engine: "AsyncMLCEngine", limits: ServerLimits, created: int) -> None:
        """created: Unix time in seconds, as the list of models shows it."""
        self.engine = engine
        self.limits = limits
        self.num_active_requests = 0
        self.device_failed = False
        """Whether the device failed the last request that it was given."""
        self._created = created

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "everycast",
        }

    def check_model(self, name: object) -> None:
        """Raises HTTPError 404 for any other model than the one that is served; none is fine."""
        if name is not None and name not in self.engine.model_names:
            raise HTTPError(
                404,
                f"model {name!r} is not served here; this server has {self.engine.model_name!r}",
                code="model_not_found",
                param="model",
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while it runs. Raises CapacityError when there are too many."""
        limit = self.limits.max_requests
        if self.num_active_requests >= limit:
            raise CapacityError(f"{limit} requests are running or waiting, the server's limit")
        self.num_active_requests += 1
        try:
            yield
            self.device_failed = False
        except DeviceError:
            self.device_failed = True
            raise
        finally:
            self.num_active_requests -= 1

    async def generate(self, request: Request, create: Create) -> Response:
        """The answer to a request whose body is that of `create`, whole or as events."""
        values = await read_json(request, self.limits.max_body_bytes)
        self.check_model(values.get("model"))
        if "self" in values:  # the one name that a keyword argument cannot have
            raise RequestError("unknown field 'self'", param="self")
        chunks = self._chunks(create, values)
        try:
            if values.get("stream") is True:
                # Until the first chunk is there an error still has its own status.
                first = await unless_disconnected(request.receive, anext(chunks))
                return EventStream(first, chunks)
            whole = await unless_disconnected(request.receive, self._whole(create, values))
            return Response(whole.model_dump_json(), media_type="application/json")
        except ClientLeft:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _whole(self, create: Create, values: dict[str, Any]) -> BaseModel:
        with self.admitted():
            answer: BaseModel = await create(**values)
            return answer

    async def _chunks(self, create: Create, values: dict[str, Any]) -> AsyncGenerator[str, None]:
        with self.admitted():
            stream: AsyncStream[Any] = await create(**values)
            async with stream:
                async for chunk in stream:
                    yield chunk.model_dump_json()


def make_router(service: Service) -> APIRouter:
    """All routes of the server."""
    router = APIRouter()
    engine = service.engine

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.generate(request, engine.chat.completions.create)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.generate(request, engine.completions.create)

    @router.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [service.model_card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(service.model_card())

    @router.get("/health")
    async def health() -> JSONResponse:
        if service.device_failed:
            return JSONResponse({"status": "the device failed"}, status_code=503)
        return JSONResponse({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> PlainTextResponse:
        text = prometheus_text(engine.metrics(), num_active_requests=service.num_active_requests)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    return router
