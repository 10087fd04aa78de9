"""The formats of errors by path, where no route knows them: for unknown routes, and for the proxy of replicas."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.serve.http.anthropic.errors import ANTHROPIC_EVENTS, as_anthropic_error
from slipstream.serve.http.cohere.errors import COHERE_EVENTS, as_cohere_error
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.ollama.errors import as_ollama_error
from slipstream.serve.http.response import EVENTS, JSON_LINES, StreamFormat

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
