"""Response: an answer on its way out, whole or in events, and an error wherever it has come to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from slipstream.serve.http.errors import HttpError
from slipstream.serve.http.reply import DONE, EventReply, Reply

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects events spoils the stream
]
_ALIVE = b": still here\n\n"  # a comment, which no client takes for an event


class Response:
    def __init__(self, send: Send, request_id: str, keep_alive: float) -> None:
        """`keep_alive`: seconds of silence in a stream after which it says that it is alive; 0 means never."""
        self._send = send
        self._id = (b"x-request-id", request_id.encode())
        self._begun = False
        self._keep_alive = keep_alive
        self._spoke = False  # since the timer last looked
        self._timer: asyncio.TimerHandle | None = None

    async def answer(self, reply: Reply | EventReply) -> int:
        if isinstance(reply, Reply):
            await self._whole(reply.status, reply.content_type, reply.body, list(reply.headers))
            return reply.status
        parts, send = reply.parts, self._send
        if self._keep_alive:
            self._set_timer()
        try:
            async for part in parts:
                if not self._begun:  # not before there is something to say: until then it may fail with a status
                    await self._begin()
                self._spoke = True
                await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            self._stop_timer()
            await parts.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return 200

    async def fail(self, error: HttpError) -> None:
        if not self._begun:
            await self._whole(error.status, b"application/json", error.body(), error.headers())
            return
        body = b"data: " + error.body() + b"\n\n" + DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self) -> None:
        self._begun = True
        headers = [*_EVENT_HEADERS, self._id]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _whole(self, status: int, kind: bytes, body: bytes, more: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), self._id, *more]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    # Silence

    def _set_timer(self) -> None:
        """Looks once in a while whether anything was said: a timer for each event would cost more than the event."""
        self._spoke = False
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive, self._look)

    def _look(self) -> None:
        if not self._spoke:
            self._saying = asyncio.ensure_future(self._say_alive())
        self._set_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _say_alive(self) -> None:
        if self._timer is None:
            return  # it has ended since
        if not self._begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": _ALIVE, "more_body": True})
