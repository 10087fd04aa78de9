"""Errors in TEI's format: a text and a type, with TEI's status codes."""

from __future__ import annotations

from typing import Literal

import msgspec

from slipstream.serve.http.errors import HTTPException

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
