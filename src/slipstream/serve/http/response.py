"""Response and StreamingResponse: what an endpoint returns. Named like Starlette's; JSON is encoded by msgspec.

Arrays that can be large are a `JsonList`, and their answers are encoded by `json_pieces`, for `AnswerPieces.join`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from slipstream.front.prompts import AnswerPieces
from slipstream.serve.http.errors import HTTPException

JSON = b"application/json"
_encode = msgspec.json.Encoder().encode


Parts = bytes | list[bytes]
"""Bytes, in parts where there may be many. Nothing else is written between the parts."""


class Response(msgspec.Struct, frozen=True):
    """A complete response."""

    body: Parts
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

    body_iterator: AsyncIterator[Parts]
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


class JsonList:
    """An array of an answer that is encoded a few items at a time, and made then. Read once."""

    def __init__(self, items: Iterable[Any], each: int = 1) -> None:
        """`each`: items that are encoded at once, of together at most some kilobytes and without a JsonList."""
        self._items = items
        self._each = each

    def pieces(self) -> Iterator[bytes]:
        items, before = iter(self._items), b"["
        while batch := list(islice(items, self._each)):
            yield before
            if self._each == 1:
                yield from json_pieces(batch[0])
            else:
                yield _encode(batch)[1:-1]
            before = b","
        yield b"[]" if before == b"[" else b"]"


_HOLE = msgspec.Raw(b"\0")  # no other JSON has this byte


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a value that has JsonLists."""
    lists: list[JsonList] = []

    def leave_out(found: Any) -> msgspec.Raw:
        if not isinstance(found, JsonList):
            raise TypeError(f"JSON has no {type(found).__name__}")
        lists.append(found)
        return _HOLE

    around = msgspec.json.encode(value, enc_hook=leave_out).split(b"\0")
    for before, found in zip(around[:-1], lists, strict=True):
        yield before
        yield from found.pieces()
    yield around[-1]


async def large_response(pieces: AnswerPieces, value: Any) -> Response:
    """The JSON of a value that has JsonLists."""
    return Response(await pieces.join(json_pieces(value)))


async def join_events(pieces: AnswerPieces, values: Iterable[Any], *, has_lists: bool) -> Parts:
    """Whole events. `has_lists`: whether the values have JsonLists."""
    if not has_lists:
        return b"".join(map(event, values))
    return await pieces.join(piece for value in values for piece in _event_pieces(value))


def _event_pieces(value: Any) -> Iterator[bytes]:
    yield b"data: "
    yield from json_pieces(value)
    yield b"\n\n"
