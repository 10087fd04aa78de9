"""Response and StreamingResponse: what an endpoint returns. Named like Starlette's; JSON is encoded by msgspec."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

JSON = b"application/json"
_encode = msgspec.json.Encoder().encode


class Response(msgspec.Struct, frozen=True):
    """A complete response."""

    body: bytes
    status_code: int = 200
    media_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class StreamingResponse(msgspec.Struct, frozen=True):
    """Server-sent events. Each item is one or more whole events."""

    body_iterator: AsyncIterator[bytes]


def json_response(value: Any, status_code: int = 200) -> Response:
    return Response(_encode(value), status_code)


DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
