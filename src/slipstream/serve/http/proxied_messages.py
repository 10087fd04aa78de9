"""The HTTP messages that a `ReplicaProxy` passes on, as callbacks of their parsers, and its own answers."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import httptools
import msgspec

from slipstream.serve.http.error_formats import end_of_stream, in_format_of
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.plain_parser import PlainParser
from slipstream.serve.http.response import JSON_LINES

_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"transfer-encoding"}


class ProxiedRequest:
    """Callbacks of the parser of a client's request. What follows it in the same bytes is not read: a connection ends
    with its first answer."""

    def __init__(self) -> None:
        self.method, self.target, self.client = b"", b"", ""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.num_counted = 0  # bytes of the body that the proxy has counted
        self.has_headers = self.is_complete = self.expects_continue = False
        self.plain_headers = b""
        self.parser = PlainParser(self)

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def on_message_begin(self) -> None:
        if not self.is_complete:
            self.target, self.headers = b"", []

    def on_url(self, url: bytes) -> None:
        if not self.is_complete:
            self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_headers:
            return  # a trailer, which says nothing about the request
        self.headers.append((name, value))
        self.expects_continue |= name.lower() == b"expect" and value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        if not self.is_complete:
            self.plain_headers = self.parser.without_offer(self.target, self.headers)
            self.has_headers, self.method = not self.plain_headers, self.parser.get_method()

    def on_body(self, data: bytes) -> None:
        if not self.is_complete:
            self.body += data

    def on_message_complete(self) -> None:
        self.is_complete |= not self.plain_headers

    def header(self, authority: str, size: int) -> bytes:
        """Start line and headers for a server."""
        dropped = _HOP | {b"host", b"content-length", b"expect"}
        lines = [b"%s %s HTTP/1.1" % (self.method, self.target), b"Host: " + authority.encode()]
        lines += [b"%s: %s" % each for each in self.headers if each[0].lower() not in dropped]
        lines += [b"X-Forwarded-For: " + self.client.encode(), b"Content-Length: %d" % size, b"Connection: close"]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class ProxiedAnswer:
    """Callbacks of the parser of a server's answer, which is written to the client as it arrives."""

    def __init__(self, writer: asyncio.StreamWriter, request: ProxiedRequest) -> None:
        self.writer = writer
        self._path = request.path
        self.parser = httptools.HttpResponseParser(self)
        self.has_begun = self.is_complete = False
        self._has_no_body = request.method == b"HEAD"
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_length = self._is_stream = self._is_chunked = False

    @property
    def ends_with_connection(self) -> bool:
        """Whether the answer has neither a length nor chunks, so that the end of the connection is its end."""
        return self.has_begun and not self._has_length and not self._is_chunked

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        self._has_length |= lower == b"content-length"
        self._is_chunked |= lower == b"transfer-encoding" and b"chunked" in value.lower()
        self._is_stream |= lower == b"content-type" and value.startswith((b"text/event-stream", JSON_LINES.media_type))
        if lower not in _HOP:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        code = self.parser.get_status_code()
        if code < 200:  # 100 Continue: the answer follows
            self._headers, self._reason = [], b""
            return
        self.has_begun = True
        lines = [b"HTTP/1.1 %d %s" % (code, self._reason)]
        lines += [b"%s: %s" % each for each in self._headers]
        lines += [b"Transfer-Encoding: chunked"] if self._is_chunked else []
        self.writer.write(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n")
        self.is_complete = self._has_no_body

    def on_body(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data) if self._is_chunked else data)

    def on_message_complete(self) -> None:
        if self.has_begun and not self.is_complete:
            self.is_complete = True
            if self._is_chunked:
                self.writer.write(b"0\r\n\r\n")

    def break_off(self, text: str) -> None:
        """Ends an answer whose rest will not come: a stream with an error event, another one by a broken connection."""
        if not self._is_stream:
            self.writer.transport.abort()
            return
        error = _error(503, f"{text}; send the request again", "replica_lost")
        self.on_body(end_of_stream(self._path.decode("latin-1"), error))
        self.on_message_complete()


def _error(status: int, text: str, kind: str | None) -> HTTPException:
    return HTTPException(status, text, kind=kind, code=kind)


def write_error(writer: asyncio.StreamWriter, status: int, text: str, kind: str | None, path: bytes) -> None:
    """`path`: of the request, whose API has a format of errors."""
    _write(writer, status, in_format_of(path.decode("latin-1"), _error(status, text, kind)).body())


def write_json(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    _write(writer, status, msgspec.json.encode(value))


def _write(writer: asyncio.StreamWriter, code: int, body: bytes) -> None:
    header = (
        f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    writer.write(f"{header}\r\nConnection: close\r\n\r\n".encode() + body)
