"""ReplicaProxy: one server in front of servers on other machines (`--replica-urls`).

A request is read whole, sent to one server (`url_replicas.py`), and the answer is passed on as it arrives. If the
server dies before the first byte of its answer, the request runs once more on another one. If it dies later, a stream
ends with an error event, and another answer with a broken connection. When the client disconnects, so does the proxy,
and the server aborts the request. Every connection has one request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from http import HTTPStatus
from typing import Any

import httptools
import msgspec

from slipstream.serve.http.server.access import Hosts
from slipstream.serve.http.server.body import MIN_RATE
from slipstream.serve.http.server.error_formats import end_of_stream, in_format_of
from slipstream.serve.http.server.errors import HTTPException
from slipstream.serve.http.server.listen import HANDSHAKE_SECONDS
from slipstream.serve.http.server.protocol import PlainParser, WriteWatch
from slipstream.serve.http.server.response import JSON_LINES
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.url_replicas import (
    LIST_CHANGES,
    PrefillFirst,
    UrlReplica,
    UrlReplicas,
    key_lines,
    named_model,
)
from slipstream.serve.signals import ENDING, call_at_signals, has_recorded, ignore_signals

log = logging.getLogger("slipstream.proxy")

MAX_RUNS = 2
READY_SECONDS = 30.0  # that a request waits for a server
_HEADER_SECONDS = 30.0  # for the request line and headers of a request
_PIECE = 2**16
_MAX_BEHIND = 2**20  # bytes that are dropped behind a request


PROBES = {b"/health", b"/ready", b"/ping", b"/livez"}  # probes, by the address of a machine; see `Route.any_host`


class _Lost(Exception):
    """A server ended the connection before its answer was complete."""


class ReplicaProxy:
    def __init__(
        self,
        settings: ServerSettings,
        replicas: UrlReplicas,
        prefill: PrefillFirst | None = None,
    ) -> None:
        """`prefill`: servers that compute prompts, whose pages the replicas fetch."""
        self.settings = settings
        self.hosts = Hosts(settings)
        self.replicas = replicas
        self.prefill = prefill
        self.num_bytes = 0  # of all bodies that are being read
        self.num_requests = self.num_rerouted = self.num_lost = 0

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> asyncio.Server:
        how: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
        return await asyncio.start_server(self._connected, sock=listener, **how)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = ProxiedRequest()
        try:
            await self._answer(request, reader, writer)
        except HTTPException as error:
            write_error(writer, error, request.path)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()
            WriteWatch(writer.transport).start()

    async def _answer(
        self, request: ProxiedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not await self._read(request, reader, writer):
            return
        if request.path in PROBES and request.method == b"GET":
            if request.path == b"/livez":
                _write(writer, 200, b'{"status":"ok"}')
            else:
                self._write_health(writer, with_urls=self.hosts.allow(request.lower_headers()))
            return
        self.num_requests += 1
        passing = asyncio.ensure_future(self._pass_on(request, writer))
        gone = asyncio.ensure_future(_until_gone(reader))
        await asyncio.wait({passing, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not passing.done():
            passing.cancel()
        await asyncio.gather(passing, gone, return_exceptions=True)
        if passing.done() and not passing.cancelled() and (error := passing.exception()) is not None:
            raise error

    async def _read(self, request: ProxiedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the request has come whole; False: the client has sent none, or not all of its headers."""
        try:
            async with asyncio.timeout(_HEADER_SECONDS) as timeout:
                if not await self._read_into(request, reader, writer, timeout):
                    return False
        except TimeoutError:
            if not request.has_headers:
                return False
            fact = f"the body is incomplete, with {len(request.body)} bytes received in time"
            raise HTTPException(408, f"{fact}; send it faster, or raise --body-timeout") from None
        finally:
            self.num_bytes -= request.num_counted
        peer = writer.get_extra_info("peername")
        request.client = str(peer[0]) if isinstance(peer, tuple) else "unix"
        return True

    async def _read_into(
        self,
        request: ProxiedRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout: asyncio.Timeout,
    ) -> bool:
        """Returns whether the request has come whole. `timeout` is that of the headers, then that of the body."""
        num_bytes = 0  # since the beginning, the headers, or the last part of the body
        loop, began_body, limit = asyncio.get_running_loop(), 0.0, self.settings.max_header_bytes
        while not request.is_complete:
            data = await reader.read(_PIECE)
            if not data:
                return False
            num_bytes, before = num_bytes + len(data), (request.has_headers, len(request.body))
            try:
                request.parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                raise HTTPException(400, "this server connects to no other") from None
            except httptools.HttpParserError as error:
                raise HTTPException(400, f"the request is not HTTP: {error}") from None
            if request.has_headers and not before[0] and request.path not in PROBES:
                self.hosts.check(request.lower_headers())
            if (request.has_headers, len(request.body)) != before:
                num_bytes = 0
                began_body = began_body or loop.time()
                if not timeout.expired():
                    timeout.reschedule(began_body + self.settings.body_timeout + len(request.body) / MIN_RATE)
            elif num_bytes > limit:
                if not request.has_headers:
                    raise HTTPException(431, f"headers have more than {limit} bytes")
                raise HTTPException(400, f"more than {limit} bytes between parts of the body, or after it")
            self._check_size(request)
            if request.expects_continue and not request.is_complete:
                request.expects_continue = False
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _check_size(self, request: ProxiedRequest) -> None:
        """Raises if the body is too large by itself or beside others."""
        size = len(request.body)
        self.num_bytes += size - request.num_counted
        request.num_counted = size
        if size > self.settings.max_body_bytes:
            raise HTTPException(413, f"the body has more than {self.settings.max_body_bytes} bytes; send less")
        # a body above the limit for all is accepted while no other is being read
        if self.num_bytes > max(self.settings.max_bodies_bytes, size):
            fact = f"bodies with {self.num_bytes} bytes are being read, the limit is {self.settings.max_bodies_bytes}"
            raise HTTPException(429, f"{fact}; try again soon")

    async def _pass_on(self, request: ProxiedRequest, writer: asyncio.StreamWriter) -> None:
        tried: list[UrlReplica] = []
        body = bytes(request.body)
        request.body.clear()  # the memory of one copy
        model = named_model(body) if request.method == b"POST" and len(self.replicas.all) > 1 else None
        if self.prefill is not None:
            await self.prefill.run(request, body)
        while len(tried) < MAX_RUNS:
            if model is not None:
                await self.replicas.find_model(model, key_lines(request.headers))
            chosen = self.replicas.choose(body, tried, model)
            if chosen is None:
                if tried or not await self.replicas.until_ready(READY_SECONDS):
                    break
                continue
            replica, hashes = chosen
            tried.append(replica)
            replica.begin(hashes, len(body), model)
            answer = ProxiedAnswer(writer, request)
            try:
                await self._run_on(replica, request, body, answer)
                return
            except (_Lost, OSError, TimeoutError, httptools.HttpParserError) as error:
                if writer.is_closing():
                    return
                replica.set_ready(False)
                log.warning("replica %s was lost: %s", replica.url, error)
                if answer.has_begun:
                    self.num_lost += 1
                    answer.break_off(f"replica {replica.url} died after it had sent a part of the result")
                    return
                self.num_rerouted += 1
            finally:
                replica.end(len(body))
                if request.path in LIST_CHANGES:
                    replica.models.expire()
        self.num_lost += 1
        text = f"{len(tried)} replicas died while they ran the request" if tried else "no replica is ready"
        write_error(writer, _lost(f"{text}; send it again later"), request.path)

    async def _run_on(self, replica: UrlReplica, request: ProxiedRequest, body: bytes, answer: ProxiedAnswer) -> None:
        reader, upstream = await replica.connect()
        watch = WriteWatch(answer.writer.transport)
        try:
            upstream.write(request.header(replica.authority, len(body)))
            upstream.write(body)
            while not answer.is_complete:
                data = await reader.read(_PIECE)
                if not data:
                    if answer.ends_with_connection:
                        answer.on_message_complete()
                        break
                    raise _Lost("the connection has ended")
                answer.parser.feed_data(data)
                watch.start()
                await answer.writer.drain()
                watch.stop()
        finally:
            watch.stop()
            upstream.close()

    def _write_health(self, writer: asyncio.StreamWriter, *, with_urls: bool) -> None:
        """`with_urls`: with the servers, which a request under any other host name does not learn."""
        ready = [replica.is_ready for replica in self.replicas.all]
        state = "ok" if all(ready) else "degraded" if any(ready) else "no replica is ready"
        found: dict[str, dict[str, object]] = {
            each.url: {"ready": each.is_ready, "open_requests": each.num_open} for each in self.replicas.all
        }
        counts = {"requests": self.num_requests, "rerouted": self.num_rerouted, "lost": self.num_lost}
        if self.prefill is not None:
            found |= {each.url: {"ready": each.is_ready, "role": "prefill"} for each in self.prefill.replicas.all}
            counts |= {"prefilled": self.prefill.num_prefilled, "not_prefilled": self.prefill.num_failed}
        shown = {"status": state, "replicas": found, **counts} if with_urls else {"status": state}
        _write(writer, 200 if any(ready) else 503, msgspec.json.encode(shown))


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Waits until the client disconnects, or sends too much behind its request: an empty line, or further requests,
    which are not answered, since the connection ends with the first answer."""
    num_bytes = 0
    while num_bytes < _MAX_BEHIND and (data := await reader.read(_PIECE)):
        num_bytes += len(data)


async def run_proxy(proxy: ReplicaProxy, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Serves until SIGINT or SIGTERM."""
    ended = asyncio.Event()
    call_at_signals(asyncio.get_running_loop(), dict.fromkeys(ENDING, ended.set))
    if has_recorded():
        ended.set()
    watching = [asyncio.ensure_future(proxy.replicas.watch())]
    if proxy.prefill is not None:
        watching.append(asyncio.ensure_future(proxy.prefill.replicas.watch()))
    try:
        async with await proxy.serve(listener, tls):
            await ended.wait()
    finally:
        for each in watching:
            each.cancel()
        ignore_signals()


# The HTTP messages that a `ReplicaProxy` passes on, as callbacks of their parsers, and its own answers.

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

    def lower_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers with their names in lower case, as a server's routes get them."""
        return [(name.lower(), value) for name, value in self.headers]

    def header(self, authority: str, size: int) -> bytes:
        """Start line and headers for a server."""
        dropped = _HOP | {b"host", b"content-length", b"expect"}
        lines = [b"%s %s HTTP/1.1" % (self.method, self.target), b"Host: " + authority.encode()]
        lines += [b"%s: %s" % each for each in self.headers if each[0].lower() not in dropped]
        lines += [b"X-Forwarded-For: " + self.client.encode(), b"Content-Length: %d" % size, b"Connection: close"]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class ProxiedAnswer:
    """Callbacks of the parser of a server's answer, which is written to the client as it arrives, a stream by whole
    events: an error may be the next one. Only a large event is written before its end has come."""

    def __init__(self, writer: asyncio.StreamWriter, request: ProxiedRequest) -> None:
        self.writer = writer
        self._path = request.path
        self.parser = httptools.HttpResponseParser(self)
        self.has_begun = self.is_complete = False
        self._has_no_body = request.method == b"HEAD"
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_length = self._is_chunked = False
        self._ends: tuple[bytes, ...] = ()  # of an event, if it is a stream
        self._part = bytearray()  # the part of an event that has come
        self._is_within = False  # the client has a part of an event

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
        if lower == b"content-type" and value.startswith(b"text/event-stream"):
            self._ends = b"\n\n", b"\r\n\r\n"
        elif lower == b"content-type" and value.startswith(JSON_LINES.media_type):
            self._ends = (b"\n",)
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
        if not self._ends:
            self._write(data)
            return
        self._part += data
        end = max(at + len(mark) if (at := self._part.rfind(mark)) >= 0 else 0 for mark in self._ends)
        if end:
            self._is_within = False
        elif len(self._part) >= _PIECE:
            self._is_within, end = True, len(self._part)
        if end:
            self._write(bytes(self._part[:end]))
            del self._part[:end]

    def _write(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data) if self._is_chunked else data)

    def on_message_complete(self) -> None:
        if self.has_begun and not self.is_complete:
            self.is_complete = True
            if self._part:
                self._write(bytes(self._part))
            if self._is_chunked:
                self.writer.write(b"0\r\n\r\n")

    def break_off(self, text: str) -> None:
        """Ends an answer whose rest will not come: a stream with an error event, another one by a broken connection."""
        if not self._ends or self._is_within:
            self.writer.transport.abort()
            return
        self._part.clear()
        error = _lost(f"{text}; send the request again")
        self._write(end_of_stream(self._path.decode("latin-1"), error))
        self.on_message_complete()


def _lost(text: str) -> HTTPException:
    return HTTPException(503, text, kind="replica_lost", code="replica_lost")


def write_error(writer: asyncio.StreamWriter, error: HTTPException, path: bytes) -> None:
    """`path`: of the request, whose API has a format of errors."""
    _write(writer, error.status, in_format_of(path.decode("latin-1"), error).body())


def _write(writer: asyncio.StreamWriter, code: int, body: bytes) -> None:
    header = (
        f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    writer.write(f"{header}\r\nConnection: close\r\n\r\n".encode() + body)
