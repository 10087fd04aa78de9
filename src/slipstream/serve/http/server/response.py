"""Response and StreamingResponse: what an endpoint returns. Named like Starlette's; JSON is encoded by msgspec.

Arrays that can be large are a `JsonList`, and their answers are encoded by `json_pieces`, for `AnswerPieces.join`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, MutableMapping
from itertools import chain, islice
from typing import Any

import msgspec

from slipstream.front.prompts import AnswerPieces
from slipstream.serve.http.server.errors import HTTPException

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


def json_array(array: Any) -> Any:
    """The numbers of an array of one or two dimensions; a JsonList of those of a large one."""
    if array.size <= _FEW:
        return array.tolist()
    if array.ndim == 2 and array.shape[1] > _FEW:
        return JsonList(_in_pieces(vector, _FEW) for vector in array)
    return _in_pieces(array, _FEW // array.shape[1] if array.ndim == 2 else _FEW)


def _in_pieces(array: Any, each: int) -> JsonList:
    parts = (array[start : start + each].tolist() for start in range(0, len(array), each))
    return JsonList(chain.from_iterable(parts), each)


_FEW = 1024  # numbers that are encoded at once: some kilobytes
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


# ResponseWriter: writes a response to the ASGI server, complete or as events, and errors at any point of it.

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
]


class ResponseWriter:
    def __init__(self, send: Send, request_id: str, keep_alive: float, *, has_no_body: bool = False) -> None:
        """`keep_alive`: seconds without an event after which a stream gets a comment; 0: never. `has_no_body`: the
        answer to a HEAD request. uvicorn leaves out the body of a whole response."""
        self._send = send
        self._id = (b"x-request-id", request_id.encode())
        self._started = False
        self._format = EVENTS
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        self._keep_alive = keep_alive
        self._has_no_body = has_no_body
        self._wrote = False  # since the timer last fired
        self._is_within = False  # an event of which a part is written
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, response: Response | StreamingResponse) -> int:
        """Writes the response and returns its status code."""
        if isinstance(response, Response):
            await self._write_complete(response.status_code, response.media_type, response.body, list(response.headers))
            return response.status_code
        parts, send = response.body_iterator, self._send
        self._format, self._headers = response.format, response.headers
        if self._keep_alive and self._format.keep_alive is not None:
            self._set_timer()
        try:
            async for part in parts:
                if self._has_no_body:
                    break
                if not self._started:  # not before the first event: until then an error still gets its own status
                    await self._start_events()
                self._wrote = True
                if isinstance(part, bytes):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                else:
                    await self._write_parts(part, is_end=False)
        finally:
            self._stop_timer()
            await parts.aclose()  # type: ignore[attr-defined]
        if not self._started:
            await self._start_events()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return 200

    async def fail(self, error: HTTPException) -> None:
        """Writes an error: as a response of its own, or as the last event of a stream that has started."""
        if not self._started:
            await self._write_complete(error.status, b"application/json", error.body(), error.headers())
            return
        await self._send({"type": "http.response.body", "body": self._format.error(error), "more_body": False})

    async def _start_events(self) -> None:
        self._started = True
        headers = [(b"content-type", self._format.media_type), *_STREAM_HEADERS, self._id, *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write_complete(self, status: int, kind: bytes, body: Parts, more: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        size = len(body) if isinstance(body, bytes) else sum(map(len, body))
        headers = [(b"content-type", kind), (b"content-length", str(size).encode()), self._id, *more]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._write_parts([body] if isinstance(body, bytes) else body, is_end=True)

    async def _write_parts(self, parts: list[bytes], *, is_end: bool) -> None:
        """Writes a body or an event in parts, without comments between them. `is_end`: of the response."""
        self._is_within = True
        *first, last = parts
        for part in first:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # a client may take all of it at once
        await self._send({"type": "http.response.body", "body": last, "more_body": not is_end})
        self._is_within = False

    # Keep-alive comments

    def _set_timer(self) -> None:
        """A periodic timer: resetting one with each event would cost more than the event."""
        self._wrote = False
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive, self._on_timer)

    def _on_timer(self) -> None:
        if not self._wrote and not self._is_within:
            self._comment = asyncio.ensure_future(self._write_comment())
        self._set_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _write_comment(self) -> None:
        if self._timer is None:
            return  # the stream ended meanwhile
        if not self._started:
            await self._start_events()
        await self._send({"type": "http.response.body", "body": self._format.keep_alive, "more_body": True})
