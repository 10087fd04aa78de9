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

import httptools

from slipstream.serve.early_signals import ENDING, call_at_signals, has_recorded, ignore_signals
from slipstream.serve.http.body import MIN_RATE
from slipstream.serve.http.prefill_first import PrefillFirst
from slipstream.serve.http.proxied_messages import ProxiedAnswer, ProxiedRequest, write_error, write_json
from slipstream.serve.http.url_models import LIST_CHANGES, key_lines, named_model
from slipstream.serve.http.url_replicas import UrlReplica, UrlReplicas
from slipstream.serve.http.write_watch import WriteWatch

log = logging.getLogger("slipstream.proxy")

MAX_RUNS = 2
READY_SECONDS = 30.0  # that a request waits for a server
_HEADER_SECONDS = 30.0  # for the request line and headers of a request
_PIECE = 2**16
_MAX_BEHIND = 2**20  # bytes that are dropped behind a request


class BadRequest(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.path = b""  # of the request, as far as it has come


class _Lost(Exception):
    """A server ended the connection before its answer was complete."""


class ReplicaProxy:
    def __init__(
        self,
        replicas: UrlReplicas,
        max_header_bytes: int = 2**16,
        max_body_bytes: int = 2**26,
        prefill: PrefillFirst | None = None,
        body_timeout: float = 30.0,
        max_bodies_bytes: int = 2**28,
    ) -> None:
        """`prefill`: servers that compute prompts, whose pages the replicas fetch. `body_timeout` (seconds) and
        `max_bodies_bytes` (of bodies that are being read): as in `body.py`."""
        self.replicas = replicas
        self.prefill = prefill
        self.max_header_bytes = max_header_bytes
        self.max_body_bytes = max_body_bytes
        self.body_timeout = body_timeout
        self.max_bodies_bytes = max_bodies_bytes
        self.num_bytes = 0  # of all bodies that are being read
        self.num_requests = self.num_rerouted = self.num_lost = 0

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> asyncio.Server:
        return await asyncio.start_server(self._connected, sock=listener, ssl=tls)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except BadRequest as error:
            write_error(writer, error.code, str(error), None, error.path)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()
            WriteWatch(writer.transport).start()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await self._read(reader, writer)
        if request is None:
            return
        if request.path == b"/health" and request.method == b"GET":
            self._write_health(writer)
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

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ProxiedRequest | None:
        """The whole request; None: the client has sent none, or not all of its headers."""
        request = ProxiedRequest()
        try:
            async with asyncio.timeout(_HEADER_SECONDS) as timeout:
                if not await self._read_into(request, reader, writer, timeout):
                    return None
        except TimeoutError:
            if not request.has_headers:
                return None
            fact = f"the body is incomplete, with {len(request.body)} bytes received in time"
            late = BadRequest(408, f"{fact}; send it faster, or raise --body-timeout")
            late.path = request.path
            raise late from None
        except BadRequest as error:
            error.path = request.path
            raise
        finally:
            self.num_bytes -= request.num_counted
        peer = writer.get_extra_info("peername")
        request.client = str(peer[0]) if isinstance(peer, tuple) else "unix"
        return request

    async def _read_into(
        self,
        request: ProxiedRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout: asyncio.Timeout,
    ) -> bool:
        """Returns whether the request has come whole. `timeout` is that of the headers, then that of the body."""
        num_bytes = 0  # since the beginning, the headers, or the last part of the body
        loop, began_body = asyncio.get_running_loop(), 0.0
        while not request.is_complete:
            data = await reader.read(_PIECE)
            if not data:
                return False
            num_bytes, before = num_bytes + len(data), (request.has_headers, len(request.body))
            try:
                request.parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                raise BadRequest(400, "this server connects to no other") from None
            except httptools.HttpParserError as error:
                raise BadRequest(400, f"the request is not HTTP: {error}") from None
            if (request.has_headers, len(request.body)) != before:
                num_bytes = 0
                began_body = began_body or loop.time()
                if not timeout.expired():
                    timeout.reschedule(began_body + self.body_timeout + len(request.body) / MIN_RATE)
            elif num_bytes > self.max_header_bytes:
                if not request.has_headers:
                    raise BadRequest(431, f"headers have more than {self.max_header_bytes} bytes")
                raise BadRequest(400, f"more than {self.max_header_bytes} bytes between parts of the body, or after it")
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
        if size > self.max_body_bytes:
            raise BadRequest(413, f"the body has more than {self.max_body_bytes} bytes; send less")
        # a body above the limit for all is accepted while no other is being read
        if self.num_bytes > max(self.max_bodies_bytes, size):
            fact = f"bodies with {self.num_bytes} bytes are being read, the limit is {self.max_bodies_bytes}"
            raise BadRequest(429, f"{fact}; try again soon")

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
        write_error(writer, 503, f"{text}; send it again later", "replica_lost", request.path)

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

    def _write_health(self, writer: asyncio.StreamWriter) -> None:
        ready = [replica.is_ready for replica in self.replicas.all]
        state = "ok" if all(ready) else "degraded" if any(ready) else "no replica is ready"
        found: dict[str, dict[str, object]] = {
            each.url: {"ready": each.is_ready, "open_requests": each.num_open} for each in self.replicas.all
        }
        counts = {"requests": self.num_requests, "rerouted": self.num_rerouted, "lost": self.num_lost}
        if self.prefill is not None:
            found |= {each.url: {"ready": each.is_ready, "role": "prefill"} for each in self.prefill.replicas.all}
            counts |= {"prefilled": self.prefill.num_prefilled, "not_prefilled": self.prefill.num_failed}
        write_json(writer, 200 if any(ready) else 503, {"status": state, "replicas": found, **counts})


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
