"""The one place where exceptions become OpenAI error bodies."""

import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..artifact.errors import CapacityError, DeviceError, EverycastError, RequestError

logger = logging.getLogger("everycast.server")

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class HTTPError(EverycastError):
    """A refusal that belongs to HTTP rather than to the engine: its status and OpenAI code."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, dict[str, str | None]]:
    """OpenAI's error object; `type` follows from the status."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: BaseException) -> tuple[int, dict[str, dict[str, str | None]]]:
    """HTTP status and body for an exception. One that is not the client's doing goes to the log;
    its text may hold what is no client's business."""
    match error:
        case HTTPError():
            body = error_body(error.status, str(error), code=error.code, param=error.param)
            return error.status, body
        case RequestError():
            return 400, error_body(400, str(error), param=error.param)
        case CapacityError():
            return 429, error_body(429, str(error), code="rate_limit_exceeded")
        case DeviceError():
            logger.error("%s", error)
            return 503, error_body(503, "the server's device failed; its log says why")
        case HTTPException():
            return error.status_code, error_body(error.status_code, str(error.detail))
        case _:
            logger.error("request failed", exc_info=error)
            return 500, error_body(500, "the server failed on this request; its log says why")


def error_response(error: BaseException) -> JSONResponse:
    status, body = describe(error)
    headers = {"Retry-After": "1"} if status == 429 else None
    if isinstance(error, HTTPException):
        headers = {**(headers or {}), **(error.headers or {})}
    return JSONResponse(body, status_code=status, headers=headers)


async def _handle(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        path = f"{request.method} {request.url.path}"
        what = "no such route" if error.status_code == 404 else "method not allowed"
        error = HTTPException(error.status_code, f"{what}: {path}", headers=error.headers)
    return error_response(error)


def install_handlers(app: FastAPI) -> None:
    """Make every error of `app` an OpenAI body, unknown routes included."""
    for kind in (HTTPException, EverycastError):
        app.add_exception_handler(kind, _handle)
