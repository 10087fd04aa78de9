"""The formats of errors by path: of routes, of unknown routes, and of the proxy of replicas."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

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


def _converted(kind: type[HTTPException], error: HTTPException) -> HTTPException:
    """The error in the format of this class, unless it has a format already."""
    if type(error) is not HTTPException:
        return error
    converted = kind(
        error.status, error.message, kind=error.kind, param=error.param, code=error.code, retry_after=error.retry_after
    )
    converted.closes = error.closes
    return converted


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


ANTHROPIC_EVENTS = StreamFormat(EVENT_STREAM, COMMENT, lambda error: b"event: error\ndata: " + error.body() + b"\n\n")


# Errors and streams in Cohere's format.


class CohereErrorBody(msgspec.Struct):
    message: str


class CohereError(HTTPException):
    def body(self) -> bytes:
        return msgspec.json.encode(CohereErrorBody(self.message))


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


class _Format(NamedTuple):
    error: type[HTTPException]
    model: type[msgspec.Struct]  # for the OpenAPI document
    events: StreamFormat


_FORMATS = {
    "/api/": _Format(OllamaError, OllamaErrorBody, JSON_LINES),
    "/v1/messages/": _Format(AnthropicError, AnthropicErrorBody, ANTHROPIC_EVENTS),
    "/v2/": _Format(CohereError, CohereErrorBody, COHERE_EVENTS),
}


def errors_of(path: str) -> dict[str, Any]:
    """The fields of a `Route` with this path that say which format its errors have; none for OpenAI's."""
    found = _format_of(path)
    return {} if found is None else {"convert_error": partial(_converted, found.error), "error_model": found.model}


def in_format_of(path: str, error: HTTPException) -> HTTPException:
    """The error in the format of the API that the path belongs to; OpenAI's where it belongs to no other."""
    found = _format_of(path)
    return error if found is None else _converted(found.error, error)


def end_of_stream(path: str, error: HTTPException) -> bytes:
    """The end of a stream of this path that fails."""
    found = _format_of(path)
    return (EVENTS if found is None else found.events).error(in_format_of(path, error))


def _format_of(path: str) -> _Format | None:
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
    if type(error) is not HTTPException:
        return error
    converted = _converted(TeiError, error)
    converted.status, converted.kind = _status_and_type(error)
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
