"""Errors and streams in Anthropic's format."""

from __future__ import annotations

import msgspec

from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.response import COMMENT, EVENT_STREAM, StreamFormat


class AnthropicErrorObject(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct):
    error: AnthropicErrorObject
    type: str = "error"


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicError(HTTPException):
    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode(AnthropicErrorBody(AnthropicErrorObject(kind, self.message)))


def as_anthropic_error(error: HTTPException) -> HTTPException:
    converted = AnthropicError(
        error.status, error.message, param=error.param, code=error.code, retry_after=error.retry_after
    )
    converted.closes = error.closes
    return converted


ANTHROPIC_EVENTS = StreamFormat(EVENT_STREAM, COMMENT, lambda error: b"event: error\ndata: " + error.body() + b"\n\n")
