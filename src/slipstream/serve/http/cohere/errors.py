"""Errors and streams in Cohere's format."""

from __future__ import annotations

import msgspec

from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.response import COMMENT, DONE, EVENT_STREAM, StreamFormat, named_event


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
