"""The HTTP application: routes, error bodies, and the engine's end."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from .errors import install_handlers
from .routes import ServerLimits, Service, make_router

if TYPE_CHECKING:
    from ..engine.async_mlc_engine import AsyncMLCEngine


def create_app(engine: "AsyncMLCEngine", limits: ServerLimits | None = None) -> FastAPI:
    """An ASGI application that serves `engine`, and terminates it when the server shuts down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.terminate)  # it waits for the step that is running

    # FastAPI's own pages are off: bodies are read within a limit, so it does not know their form.
    app = FastAPI(
        title="everycast",
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
    )
    install_handlers(app)
    app.include_router(make_router(Service(engine, limits or ServerLimits(), int(time.time()))))
    return app
