"""A request's body: read within a limit, then parsed strictly."""

from typing import Any

from fastapi import Request
from pydantic_core import from_json

from ..artifact.errors import RequestError
from .errors import HTTPError


async def read_json(request: Request, max_body_bytes: int) -> dict[str, Any]:
    """The JSON object of the body.

    Raises HTTPError 413 for more than `max_body_bytes` (not one byte more is kept), RequestError
    for anything but an object: bad UTF-8, NaN, lone surrogates and bottomless nesting included.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_body_bytes:
        raise _too_large(max_body_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_body_bytes:
            raise _too_large(max_body_bytes)
    try:
        value = from_json(bytes(body), allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {type(value).__name__}")
    return value


def _too_large(max_body_bytes: int) -> HTTPError:
    return HTTPError(413, f"the body is larger than {max_body_bytes} bytes, the server's limit")
