"""What we change of uvicorn's HTTP protocol.

A head that is too long or comes too slowly ends its connection: uvicorn bounds heads only where h11 parses them, and
httptools, which is faster, would collect headers without end. So does a body that goes on after its answer (`body.py`
bounds those that are read). The head of an answer leaves together with the first of
its body: a write to a socket is a good part of what a short request costs. And where there is no room for a request, it
is refused on its head alone, with no task made for it: a crowd that is turned away must cost less than one let in.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from slipstream.serve.http.auth import Headers
from slipstream.serve.http.call import Address
from slipstream.serve.http.errors import HttpError

_HEAD_SECONDS = 30.0
_REST_SECONDS = 30.0  # for the rest of a body that nobody reads: its request was answered before all of it had come


class Door(Protocol):
    """Says of a request's head whether it may come in."""

    def refusal(self, method: str, path: str, headers: Headers, client: Address | None) -> tuple[HttpError, str] | None:
        """Why not, and the request's id; None where it may, or where there is more to say than that it is full."""


def bounded(max_head: int, door: Door) -> type[HttpToolsProtocol]:
    """A protocol class whose heads have at most this many bytes."""

    class BoundedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_head = True
            self._head_bytes = 0
            self._refused = False
            self._timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.transport = _Joined(transport)  # type: ignore[assignment]
            self._timer = self.loop.call_later(_HEAD_SECONDS, self._too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_timer()
            self._refused = self._is_answered() and self._refuse()
            if not self._refused:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_head, self._head_bytes = True, 0  # of the next request
            self._stop_timer()
            if not self._refused:
                super().on_message_complete()
            elif not self.parser.should_keep_alive():
                self.transport.close()  # not before all of it is read, or the client would not see the answer

        def on_response_complete(self) -> None:
            self.transport.flush()  # type: ignore[attr-defined]  # an answer to HEAD has nothing after its head
            super().on_response_complete()
            if not self._in_head and self._timer is None:  # who has its answer need not read on for ever
                self._timer = self.loop.call_later(_REST_SECONDS, self._too_slow)

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            if self._in_head and self._head_bytes > max_head and b"\r\n\r\n" not in data[:max_head]:
                self._unset_keepalive_if_required()
                self.send_400_response(f"The request line and headers have more than {max_head} bytes.")
                return
            super().data_received(data)
            if self.transport.is_closing():
                return
            if self._in_head and self._head_bytes and self._timer is None:  # another head has begun
                self._timer = self.loop.call_later(_HEAD_SECONDS, self._too_slow)
            if self._is_answered() and self.timeout_keep_alive_task is None:
                # uvicorn stops this clock at any data, and goes on with it only after an answer
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        def _is_answered(self) -> bool:
            """Whether nobody waits for an answer."""
            return self.cycle is None or self.cycle.response_complete

        def _refuse(self) -> bool:
            path = self.url.partition(b"?")[0].decode("latin-1")
            found = door.refusal(self.parser.get_method().decode("latin-1"), path, self.headers, self.client)
            if found is None:
                return False
            error, request_id = found
            body = error.body()
            # who asked whether to send a body may now leave it away, and what comes next would be taken for it
            goes_on = self.parser.should_keep_alive() and not self.expect_100_continue
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", request_id.encode()),
                *error.headers(),
                (b"connection", b"keep-alive" if goes_on else b"close"),
            ]
            lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write_whole(STATUS_LINE[error.status] + lines + b"\r\n" + body)  # type: ignore[attr-defined]
            if self.expect_100_continue:
                self.transport.close()
            self.on_response_complete()
            return True

        def _too_slow(self) -> None:
            self._timer = None
            if self._is_answered() and not self.transport.is_closing():
                self.transport.close()

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return BoundedProtocol


class _Joined:
    """A transport that keeps the head of an answer until what follows it is written."""

    __slots__ = ("_transport", "_head", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._head = data
            return
        self._transport.write(data)

    def write_whole(self, data: bytes) -> None:
        self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
