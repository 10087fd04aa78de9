"""Extends uvicorn's HTTP protocol: limits on headers, one write per short response, refusals before the body is read.

A connection is closed if the headers of a request, or trailers and chunk extensions of its body, are too large or too
slow (uvicorn limits headers only with h11; httptools, which is faster, would buffer headers and trailers without end),
if a body continues long after its response (`body.py` limits bodies that are read), or if the client does not read its
response (WriteWatch). The headers of a response are written together with the first part of its body, since a
write to a socket is a large part of the cost of a short request. If the queue is full, a request is refused when its
headers are parsed, without creating a task: under overload a refusal must cost less than a request.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from slipstream.serve.http.server.access import Headers
from slipstream.serve.http.server.errors import HTTPException
from slipstream.serve.http.server.request import Address

_HEADER_SECONDS = 30.0
_REST_SECONDS = 30.0  # for the rest of a body whose response was sent before the body was complete


class RequestGate(Protocol):
    """Decides by the headers of a request whether to refuse it."""

    def refusal(
        self, method: str, path: str, headers: Headers, client: Address | None
    ) -> tuple[HTTPException, str] | None:
        """Returns the error and the request id of a refusal; None if the request takes the normal path."""


def bounded_protocol(limit: int, gate: RequestGate) -> type[BoundedProtocol]:
    """Returns a protocol class with a request line and headers of at most `limit` bytes."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limit": limit, "gate": gate})


class BoundedProtocol(HttpToolsProtocol):
    """The protocol of one connection. uvicorn takes a class: `bounded_protocol` makes one with these attributes.

    A connection ends with its answer if another request comes before that (HTTP pipelining). A client must expect it
    (RFC 9112, 9.3.2), none of those in use pipelines, and uvicorn would keep all of them: 1 GB of 16 MB that were sent.
    """

    limit: int  # bytes of the request line and headers
    gate: RequestGate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = PlainParser(self)  # type: ignore[assignment]
        self.plain_headers = b""
        self._in_headers = True
        self._header_bytes = 0  # since the end of the last request, headers or part of a body
        self._refused = False
        self._is_ending = False  # with the answer that is under way: further bytes are dropped
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch = WriteWatch(transport)
        self.transport = _HeaderJoiner(transport, self._watch)  # type: ignore[assignment]
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._watch.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._watch.start()
        super().pause_writing()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():  # else all of the buffer is to be read
            self._watch.stop()
        super().resume_writing()

    def on_message_begin(self) -> None:
        if not self._is_answered():
            self._is_ending, self.cycle.keep_alive = True, False
            raise StopParsing
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.plain_headers = self.parser.without_offer(self.url, self.headers)  # type: ignore[attr-defined]
        if self.plain_headers:  # the parser begins again
            return
        self._in_headers, self._header_bytes = False, 0
        self._stop_timer()
        self._refused = self._is_answered() and self._refuse()
        if not self._refused:
            super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else a trailer, after the last chunk of a body: it says nothing about the request
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.plain_headers:
            return
        self._in_headers, self._header_bytes = True, 0  # the next request begins
        self._stop_timer()
        if not self._refused:
            super().on_message_complete()
        elif not self.parser.should_keep_alive():
            self.transport.close()  # after the whole request is read, else the client may not see the response

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]  # a response to HEAD has no body
        super().on_response_complete()
        if not self._in_headers and self._timer is None:  # the rest of the body has limited time
            self._timer = self.loop.call_later(_REST_SECONDS, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        self._header_bytes += len(data)
        if self._in_headers and self._header_bytes > self.limit and b"\r\n\r\n" not in data[: self.limit]:
            self._unset_keepalive_if_required()
            self.send_400_response(f"The request line and headers have more than {self.limit} bytes.")
            return
        super().data_received(data)
        if self.transport.is_closing() or self._is_ending:
            return
        if not self._in_headers and self._header_bytes > self.limit:  # and this data had no part of the body
            self.send_400_response(f"More than {self.limit} bytes between parts of the body, or after it.")
            return
        if self._in_headers and self._header_bytes and self._timer is None:  # the next headers have begun
            self._timer = self.loop.call_later(_HEADER_SECONDS, self._too_slow)
        if self._is_answered() and self.timeout_keep_alive_task is None:
            # uvicorn stops this timer at any data, and restarts it only after a response
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _is_answered(self) -> bool:
        """Whether no request waits for a response."""
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self) -> bool:
        path = self.url.partition(b"?")[0].decode("latin-1")
        found = self.gate.refusal(self.parser.get_method().decode("latin-1"), path, self.headers, self.client)
        if found is None:
            return False
        error, request_id = found
        body = error.body()
        # after Expect: 100-continue a client may omit the body, and the next request would be parsed as the body
        keeps_alive = self.parser.should_keep_alive() and not self.expect_100_continue
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            *error.headers(),
            (b"connection", b"keep-alive" if keeps_alive else b"close"),
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


class _HeaderJoiner:
    """A transport that holds the headers of a response back until the next write."""

    __slots__ = ("_transport", "_watch", "_headers", "is_closing")

    def __init__(self, transport: asyncio.Transport, watch: WriteWatch) -> None:
        self._transport = transport
        self._watch = watch
        self._headers = b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._headers:
            data, self._headers = self._headers + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._headers = data
            return
        self._transport.write(data)

    def write_whole(self, data: bytes) -> None:
        self._transport.write(data)

    def flush(self) -> None:
        if self._headers:
            self._transport.write(self._headers)
            self._headers = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()
        self._watch.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


# WriteWatch: ends a connection whose client does not read its response.
#
# A response that is written waits in the transport's buffer, also after the connection is closed, until the client has
# read it: a client that never reads would hold the socket, and the response, for ever.

_SECONDS = 60.0  # without a byte that the client takes


class WriteWatch:
    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._size = 0  # bytes in the buffer at the last look
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on the buffer must shrink."""
        if self._timer is None:
            self._set_timer()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self._size = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, self._look) if self._size else None

    def _look(self) -> None:
        if self._transport.get_write_buffer_size() < self._size:
            self._set_timer()
        else:
            self._timer = None
            self._transport.abort()


# PlainParser: httptools' parser of requests, for which `Upgrade` has no effect.
#
# A server may ignore an offer to change the protocol (RFC 9110, 7.8), and the request is then answered as any other.
# Some clients offer HTTP/2 in every request: Java's. httptools stops at the headers of such a request, without its
# body, and takes the bytes of the body for the next request. Here the request is parsed again, without the offer.

_OFFER = (b"upgrade", b"http2-settings")


class StopParsing(Exception):
    """Raised by a callback: the rest of the data is not parsed."""


class Receiver(Protocol):
    """The callbacks of the parser. At the end of headers it sets `plain_headers` to what `without_offer` returns; while
    they are not empty, headers and message have not ended."""

    plain_headers: bytes


class PlainParser:
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._renew()

    def feed_data(self, data: bytes) -> None:
        while True:
            try:
                return self._feed(data)
            except httptools.HttpParserUpgrade as pause:
                headers, self._receiver.plain_headers = self._receiver.plain_headers, b""
                if not headers:
                    raise
                self._renew()
                data = headers + data[pause.args[0] :]
            except httptools.HttpParserCallbackError as error:
                if not isinstance(error.__context__, StopParsing):
                    raise
                return

    def without_offer(self, target: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Returns request line and headers of a request with an offer, without the offer; empty for other requests."""
        method = self.get_method() if self.should_upgrade() else b"CONNECT"
        if method == b"CONNECT":  # nothing is left of it without the other protocol
            return b""
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, self.get_http_version().encode(), _lines(headers))

    def _renew(self) -> None:
        parser = httptools.HttpRequestParser(self._receiver)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self._feed = parser.feed_data
        self.get_method, self.get_http_version = parser.get_method, parser.get_http_version
        self.should_keep_alive, self.should_upgrade = parser.should_keep_alive, parser.should_upgrade


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    lower = [(name.lower(), value) for name, value in headers]
    kept = [(name, value) for name, value in lower if name not in _OFFER and name != b"connection"]
    wishes = [wish.strip().lower() for name, value in lower if name == b"connection" for wish in value.split(b",")]
    kept += [(b"connection", wish) for wish in wishes if wish in (b"close", b"keep-alive")]
    return b"".join(b"%b: %b\r\n" % header for header in kept)
