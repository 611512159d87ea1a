"""The browser page over HTTP: static files, with the headers that workers and caches want."""

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..artifact.hashing import hash_bytes
from ..artifact.web_index import MODELS_JSON, index_json
from ..artifact.web_site import HEADERS, INDEX_HTML, Site, SiteFile, cache_control, content_type
from .app import create_app
from .errors import HTTPError, install_handlers
from .routes import ServerLimits

if TYPE_CHECKING:
    from ..engine.async_mlc_engine import AsyncMLCEngine


def create_web_app(
    site: Site, engine: "AsyncMLCEngine | None" = None, limits: ServerLimits | None = None
) -> FastAPI:
    """An application that serves the page and its models, and with an engine also OpenAI's routes,
    for browsers that cannot run a model themselves.

    Responses carry entity tags and answer byte ranges, so that a download that broke goes on where
    it broke. Only files of `site` are ever served.
    """
    if engine is None:
        app = FastAPI(title="everycast", openapi_url=None, redirect_slashes=False)
        install_handlers(app)
    else:
        app = create_app(engine, limits)
    app.add_middleware(_WithHeaders)
    files = site.files()
    index = index_json(site.models, has_server=engine is not None)

    @app.api_route("/{name:path}", methods=["GET", "HEAD"])
    async def serve(name: str, request: Request) -> Response:
        name = name or INDEX_HTML
        if name == MODELS_JSON:
            response = _bytes_response(index)
        elif (file := files.get(name)) is not None:
            response = _file_response(name, file)
        else:
            raise HTTPError(404, f"there is no file {name}")
        response.headers["Cache-Control"] = cache_control(name)
        return _unless_known(request, response)

    return app


class _WithHeaders:
    """Gives every response, errors too, the headers of the page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _bytes_response(data: bytes) -> Response:
    headers = {"ETag": f'"{hash_bytes(data)}"'}
    return Response(data, media_type=content_type(MODELS_JSON), headers=headers)


def _file_response(name: str, file: SiteFile) -> FileResponse:
    try:
        stat = file.source.stat()
    except OSError:
        raise HTTPError(404, f"{name} was removed from this machine") from None
    headers = {} if file.etag is None else {"ETag": file.etag}
    return FileResponse(
        file.source, media_type=content_type(name), headers=headers, stat_result=stat
    )


def _unless_known(request: Request, response: Response) -> Response:
    """304 without a body if the client's copy is this one (RFC 9110, 13.1.2)."""
    known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    if response.headers["etag"] not in known:
        return response
    kept = {
        name: value
        for name, value in response.headers.items()
        if name not in ("content-length", "content-type", "accept-ranges")
    }
    return Response(status_code=304, headers=kept)
