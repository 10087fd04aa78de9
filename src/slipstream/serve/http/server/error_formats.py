"""The formats of errors by path, where no route knows them: for unknown routes, and for the proxy of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from slipstream.serve.http.server.errors import HTTPException
from slipstream.serve.http.server.response import (
    COMMENT,
    DONE,
    EVENT_STREAM,
    EVENTS,
    JSON_LINES,
    StreamFormat,
    named_event,
)

# Errors and streams in Anthropic's format.


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


# Errors and streams in Cohere's format.


class CohereErrorBody(msgspec.Struct):
    message: str


class CohereError(HTTPException):
    def body(self) -> bytes:
        return msgspec.json.encode(CohereErrorBody(self.message))


def as_cohere_error(error: HTTPException) -> HTTPException:
    converted = CohereError(
        error.status, error.message, param=error.param, code=error.code, retry_after=error.retry_after
    )
    converted.closes = error.closes
    return converted


def _failed(error: HTTPException) -> bytes:
    delta = {"finish_reason": "ERROR", "error": error.message}
    return named_event("message-end", {"type": "message-end", "delta": delta}) + DONE


COHERE_EVENTS = StreamFormat(EVENT_STREAM, COMMENT, _failed)


# Errors in Ollama's format: an object with a text.


class OllamaErrorBody(msgspec.Struct):
    error: str


class OllamaError(HTTPException):
    def body(self) -> bytes:
        return msgspec.json.encode(OllamaErrorBody(self.message))


def as_ollama_error(error: HTTPException) -> HTTPException:
    converted = OllamaError(
        error.status, error.message, param=error.param, code=error.code, retry_after=error.retry_after
    )
    converted.closes = error.closes
    return converted


_FORMATS: dict[str, tuple[Callable[[HTTPException], HTTPException], StreamFormat]] = {
    "/api/": (as_ollama_error, JSON_LINES),
    "/v1/messages/": (as_anthropic_error, ANTHROPIC_EVENTS),
    "/v2/": (as_cohere_error, COHERE_EVENTS),
}


def in_format_of(path: str, error: HTTPException) -> HTTPException:
    """The error in the format of the API that the path belongs to; OpenAI's where it belongs to no other."""
    found = _format_of(path)
    return error if found is None else found[0](error)


def end_of_stream(path: str, error: HTTPException) -> bytes:
    """The end of a stream of this path that fails."""
    found = _format_of(path)
    return (EVENTS if found is None else found[1]).error(in_format_of(path, error))


def _format_of(path: str) -> tuple[Callable[[HTTPException], HTTPException], StreamFormat] | None:
    return next((found for prefix, found in _FORMATS.items() if f"{path}/".startswith(prefix)), None)


# Errors in TEI's format: a text and a type, with TEI's status codes.

ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class TeiErrorBody(msgspec.Struct):
    error: str
    error_type: ErrorType


class TeiError(HTTPException):
    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.message, "error_type": self.kind})


def as_tei_error(error: HTTPException) -> HTTPException:
    status, kind = _status_and_type(error)
    converted = TeiError(status, error.message, kind=kind, code=error.code, retry_after=error.retry_after)
    converted.closes = error.closes
    return converted


def _status_and_type(error: HTTPException) -> tuple[int, ErrorType]:
    if error.status == 429:
        return 429, "Overloaded"
    if error.status == 503:
        return 503, "Unhealthy"
    if error.status >= 500:
        return 424, "Backend"
    if error.code == "empty":
        return 400, "Empty"
    if error.code in ("context_length_exceeded", "too_many_inputs"):
        return 413, "Validation"
    if error.status == 400:
        return 422, "Validation"
    return error.status, "Validation"
