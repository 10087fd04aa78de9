"""Errors in Ollama's format: an object with a text."""

from __future__ import annotations

import msgspec

from slipstream.serve.http.errors import HTTPException


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
