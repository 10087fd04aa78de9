"""Response and StreamingResponse: what an endpoint returns. Named like Starlette's; JSON is encoded by msgspec."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from slipstream.serve.http.errors import HTTPException

JSON = b"application/json"
_encode = msgspec.json.Encoder().encode


class Response(msgspec.Struct, frozen=True):
    """A complete response."""

    body: bytes
    status_code: int = 200
    media_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class StreamFormat(msgspec.Struct, frozen=True):
    """The format of a stream."""

    media_type: bytes
    keep_alive: bytes | None  # sent to keep a silent stream open; None if the format has no comments
    error: Callable[[HTTPException], bytes]  # the end of a stream that fails


DONE = b"data: [DONE]\n\n"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
COMMENT = b": still here\n\n"  # clients ignore it
EVENTS = StreamFormat(EVENT_STREAM, COMMENT, lambda error: b"data: " + error.body() + b"\n\n" + DONE)
"""OpenAI's server-sent events."""
JSON_LINES = StreamFormat(b"application/x-ndjson", None, lambda error: error.body() + b"\n")
"""Ollama's: one JSON object per line."""


class StreamingResponse(msgspec.Struct, frozen=True):
    """Each item is one or more whole events (or lines)."""

    body_iterator: AsyncIterator[bytes]
    format: StreamFormat = EVENTS
    headers: tuple[tuple[bytes, bytes], ...] = ()


def json_response(value: Any, status_code: int = 200) -> Response:
    return Response(_encode(value), status_code)


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(value))


def json_line(value: Any) -> bytes:
    return _encode(value) + b"\n"
