"""Runs the application under uvicorn on a socket that was bound before the model was loaded."""

import asyncio
import math
import socket
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from ..artifact.errors import CapacityError
from .app import create_app
from .routes import ServerLimits

if TYPE_CHECKING:
    from ..engine.async_mlc_engine import AsyncMLCEngine

GRACE_S = 10.0
"""How long answers may go on after the server was told to stop."""
_CANCEL_S = 5
"""After the answers were ended: how long their clients may take to read the end."""


class Server(uvicorn.Server):
    """A uvicorn server that ends what still runs after `grace_s` seconds of shutdown in order:
    the engine, if there is one, aborts it, so clients get the finish reason "abort" and a complete
    response."""

    def __init__(
        self, config: uvicorn.Config, engine: "AsyncMLCEngine | None", grace_s: float
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_answers(self) -> None:
        await asyncio.sleep(self._grace_s)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.terminate)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet: clients are refused until there is a
    model. Port 0 takes a free one. Raises CapacityError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise CapacityError(f"--host {host} is no address of this machine: {error}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise CapacityError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port"
        ) from error
    return bound


def url(bound: socket.socket) -> str:
    """Where clients on this machine reach a bound socket, such as `http://127.0.0.1:8000`.

    One that is bound to all addresses is reached at the loopback: browsers refuse WebGPU to a page
    from `http://0.0.0.0`.
    """
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(
    engine: "AsyncMLCEngine", limits: ServerLimits | None = None, *, grace_s: float = GRACE_S
) -> Server:
    """A server that is not running; `serve(sockets=[…])` or `run(sockets=[…])` starts it."""
    return _make(create_app(engine, limits), engine, grace_s)


def _make(app: FastAPI, engine: "AsyncMLCEngine | None", grace_s: float) -> Server:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=math.ceil(grace_s) + _CANCEL_S,
    )
    return Server(config, engine, grace_s)


def run_server(
    engine: "AsyncMLCEngine", bound: socket.socket, limits: ServerLimits | None = None
) -> None:
    """Serve until Ctrl-C or SIGTERM; answers that are under way get `GRACE_S` to finish."""
    _run(make_server(engine, limits), bound)


def run_app(app: FastAPI, bound: socket.socket, engine: "AsyncMLCEngine | None" = None) -> None:
    """As `run_server`, for any application; `engine` is the one whose answers may be under way."""
    _run(_make(app, engine, GRACE_S), bound)


def _run(server: Server, bound: socket.socket) -> None:
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:
        pass  # uvicorn has shut down in order and raises the signal again
