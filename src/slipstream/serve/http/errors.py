"""What a failed request gets back: OpenAI's error object, with a status that says whose fault it was.

400 the request        401, 403 the key        404 no such route or model      405 the method
408 the deadline       413 the body            415 not JSON                    429 too many waiting
500 our fault          503 not ready, draining, or the engine is lost
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from slipstream.errors import (
    EngineClosed,
    EngineDead,
    ModelNotFound,
    PromptTooLong,
    QueueFull,
    SlipstreamError,
    UserError,
)
from slipstream.serve.http.wording import in_http


class HttpError(Exception):
    """Ends a request with this status and this message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        closes: bool = False,
    ) -> None:
        """`closes`: the connection ends with the answer, for the rest of the request never came."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.closes = closes

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(ErrorObject(self.message, self.kind, self.param, self.code)))

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = [(b"connection", b"close")] if self.closes else []
        if self.retry_after is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        return found


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorObject


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    return HttpError(400, message, param=param, code=code)


def misfit(error: msgspec.ValidationError) -> HttpError:
    """A body that is JSON and not what the route takes."""
    text, _, place = str(error).partition(" - at `")
    param = place.removeprefix("key in `").removeprefix("$").strip("`.").replace("[...]", "") or None
    if text.startswith(("Object contains unknown field", "Object missing required field")):
        param = ".".join(filter(None, (param, text.split("`")[1])))
        if text.startswith("Object contains"):
            return bad_request(f"there is no field {param}; leave it out", param=param)
        return bad_request(f"{param} is missing; give it", param=param)
    return bad_request(f"{param or 'the body'}: {text}", param=param)


def as_http_error(error: Exception, request_id: str, names: Mapping[str, str] = MappingProxyType({})) -> HttpError:
    """Our own exceptions say what a caller may know. Of any other it learns only where the log has it.

    `names`: parameters of the engine that the request calls otherwise.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, UserError):
        param = None if error.param is None else names.get(error.param, error.param)
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        return bad_request(in_http(str(error), names), param, code)
    if isinstance(error, ModelNotFound):
        return HttpError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, QueueFull):
        return HttpError(429, str(error), retry_after=1, code="queue_full")
    if isinstance(error, EngineDead | EngineClosed):
        return HttpError(503, "the engine has ended and takes no more requests; restart the server", code="engine_dead")
    if isinstance(error, SlipstreamError):
        return bad_request(in_http(str(error), names))
    return HttpError(500, f"something failed inside the server; its log says more under {request_id}")
