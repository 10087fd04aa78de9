"""What a handler gives back: a whole answer, or events as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

JSON = b"application/json"
_encode = msgspec.json.Encoder().encode


class Reply(msgspec.Struct, frozen=True):
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class EventReply(msgspec.Struct, frozen=True):
    """Server-sent events. Each part is one or more whole events, ready to be written."""

    parts: AsyncIterator[bytes]


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(_encode(value), status)


DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
