"""One front-end process: the event loop with the HTTP server, signal handling, draining and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from slipstream.base.errors import UserError
from slipstream.base.processes import release_signals
from slipstream.front.async_engine import AsyncEngine
from slipstream.front.prompts import bound_heap
from slipstream.metrics.stats import SharedCounters
from slipstream.serve.http.server.access import Headers
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.batch_runner import BatchRunner
from slipstream.serve.http.server.batch_store import BatchService
from slipstream.serve.http.server.errors import HTTPException
from slipstream.serve.http.server.listen import HANDSHAKE_SECONDS, server_context
from slipstream.serve.http.server.request import Address
from slipstream.serve.http.server.response import Receive, Send
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.server.supervisor import AT_ONCE
from slipstream.serve.http.table import all_routes
from slipstream.serve.signals import ENDING, call_at_signals, has_recorded, ignore_signals
from slipstream.transport.frames import refused_option
from slipstream.transport.replicas import ReplicaClient
from slipstream.transport.sockets import SocketClient

status = logging.getLogger("slipstream.status")

_LOST_SECONDS = 1.0  # after the loss of the core, for open requests to fail and for /health to report it


class WorkerEnd(NamedTuple):
    """The reason why a front end ended without a signal."""

    cause: str
    by_core: bool  # the core exited or its connection was lost; else this front end could not start
    refused: UserError | None = None  # of the options, at the start of the core


def run_worker(
    settings: ServerSettings,
    listener: socket.socket,
    connect: Callable[[], Awaitable[SocketClient | ReplicaClient]],
    shared: SharedCounters | None = None,
    responses: Path | None = None,
) -> WorkerEnd | None:
    """Serves until a signal ends it; returns None then. `connect` makes the client of the core or of its replicas. With
    `shared` it is one of several under a supervisor, which share the store `responses`."""
    bound_heap()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Worker(settings, shared, responses).run(listener, connect))


class _Worker:
    def __init__(self, settings: ServerSettings, shared: SharedCounters | None, responses: Path | None) -> None:
        self.settings = settings
        self.shared = shared
        self.responses = responses
        self.drain: asyncio.Task[None] | None = None
        self.runner: BatchRunner | None = None

    async def run(
        self, listener: socket.socket, connect: Callable[[], Awaitable[SocketClient | ReplicaClient]]
    ) -> WorkerEnd | None:
        try:
            return await self._serve(listener, connect)
        finally:
            await asyncio.get_running_loop().shutdown_default_executor()
            ignore_signals(AT_ONCE)

    async def _serve(
        self, listener: socket.socket, connect: Callable[[], Awaitable[SocketClient | ReplicaClient]]
    ) -> WorkerEnd | None:
        client = await connect()
        engine = AsyncEngine(client=client)
        self.state = State(self.settings, engine, self.shared, self.responses)
        plain = App(self.state, all_routes())
        if self.settings.batch_dir is not None:
            self.state.batches = BatchService(self.settings)
            self.runner = BatchRunner(plain, self.state.batches)
        app = Cors(plain, self.settings) if self.settings.allowed_origins else plain
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            **_parser(self.settings.max_header_bytes, app),
        )
        self.server = Server(config, server_context(self.settings))
        loop = asyncio.get_running_loop()
        call_at_signals(loop, dict.fromkeys(ENDING, self._on_signal) | {AT_ONCE: self._end_at_once})
        release_signals()
        if has_recorded():
            self._on_signal()
        helpers = [loop.create_task(self._announce()), loop.create_task(self._until_lost())]
        if self.shared is not None or self.settings.status_interval > 0:
            helpers.append(loop.create_task(self.state.server_stats.run()))
        if self.settings.watchdog_timeout > 0:
            helpers.append(loop.create_task(Watchdog(self.state, self.settings.watchdog_timeout).run()))
        if self.runner is not None:
            helpers.append(loop.create_task(self.runner.run()))
        try:
            await self.server.serve(sockets=[listener])
        finally:
            for helper in helpers:
                helper.cancel()
            if self.runner is not None:
                await self.runner.stop()
        failure, by_core = engine.failure, client.is_lost
        await engine.close()
        if self.state.batches is not None:
            self.state.batches.close()
        self.state.responses.close()
        self.state.beam_grammars.close()
        if self.state.traces is not None:
            await asyncio.to_thread(self.state.traces.close)
        if failure is None:
            return None
        return WorkerEnd(client.cause or str(failure), by_core, refused_option(failure))

    async def _announce(self) -> None:
        with contextlib.suppress(Exception):  # a failed start is reported by its cause
            await self.state.engine.until_ready()
            gc.freeze()  # loaded objects are permanent, so the collector need not scan them
            status.info("ready: serving %s", ", ".join(self.state.engine.models))

    async def _until_lost(self) -> None:
        await self.state.engine.until_lost()
        await asyncio.sleep(_LOST_SECONDS)
        self.server.should_exit = True

    def _on_signal(self) -> None:
        """The first signal drains, the second exits at once. Under a supervisor, which counts signals, each drains."""
        if self.drain is None:
            self.drain = asyncio.get_running_loop().create_task(self._drain())
        elif self.shared is None:
            self._end_at_once()

    def _end_at_once(self) -> None:
        self.server.should_exit = self.server.force_exit = True

    async def _drain(self) -> None:
        """Refuses new requests, waits for the open ones up to the drain timeout, and aborts the rest."""
        self.state.drain()
        running, deadline = self.server.server_state.tasks, time.monotonic() + self.settings.drain_timeout
        if running:
            status.info("draining: %d requests have %g s", len(running), self.settings.drain_timeout)
        while running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.runner is not None:
            await self.runner.stop()  # else an aborted line would be stored as a result
        count = await self.state.engine.abort_all()
        self.state.counters.aborted["drain"] += count
        self.server.should_exit = True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
    return factory


def _parser(max_header_bytes: int, app: App | Cors) -> dict[str, Any]:
    try:
        from slipstream.serve.http.server.protocol import bounded_protocol  # needs httptools
    except ImportError:
        return {"http": "h11", "h11_max_incomplete_event_size": max_header_bytes}
    return {"http": bounded_protocol(max_header_bytes, app)}


# Server: uvicorn's server with our own signal handling and our own accept loop.
#
# uvloop accepts one connection per iteration of the event loop. Under load, iterations are long, and thousands of new
# clients would wait seconds before they even get a 429. This accept loop accepts all pending connections at once.

log = logging.getLogger("slipstream.http")

_ACCEPT_LIMIT = 256  # connections accepted per iteration of the event loop
_BACKLOG = 4096  # pending connections, up to the system's limit
_CLOSE_SECONDS = 5.0  # for responses to be written during shutdown
_ABORT_SECONDS = 2.0  # for handlers whose connections were aborted
_PAUSE_SECONDS = 0.5  # until the next attempt where a connection cannot be accepted


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `worker.py` handles signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for sock in sockets or []:
            self.servers.append(Acceptor(sock, self._protocol, self._tls))  # type: ignore[arg-type]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for responses to be written, then aborts the remaining connections; their handlers see a disconnect."""
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._until_closed(_CLOSE_SECONDS, lambda: self.force_exit)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._until_closed(_ABORT_SECONDS)
        for task in self.server_state.tasks:
            log.error("a handler did not end: %r", task)
            task.cancel()
        for server in self.servers:
            await server.wait_closed()

    async def _until_closed(self, seconds: float, is_forced: Callable[[], bool] = lambda: False) -> None:
        """Waits until connections and handlers have ended, for `seconds` at most, or until `is_forced`."""
        state, deadline = self.server_state, time.monotonic() + seconds
        while (state.connections or state.tasks) and not is_forced() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class Acceptor:
    """Accepts connections until it is closed."""

    def __init__(
        self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None = None
    ) -> None:
        self.sock = sock
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._resume()

    def close(self) -> None:
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self.sock)
        for task in self._opening:  # TLS handshakes: no request has come
            task.cancel()

    async def wait_closed(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self.sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPT_LIMIT):
            try:
                connection, _ = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # usually no file descriptor is left
                log.error("connections cannot be accepted: %s; trying again in %g s", error.strerror, _PAUSE_SECONDS)
                self._loop.remove_reader(self.sock)
                self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client has disconnected, or does not use TLS
            transport, _ = await self._loop.connect_accepted_socket(self._make_protocol, connection, **self._tls)
            if self._closed:  # meanwhile: `shutdown` has not seen this connection
                transport.close()


# Cors: adds CORS headers for the origins of --allowed-origins. It is not used without any, and browsers allow none.

_MAX_AGE = b"600"  # seconds for which a browser caches a preflight
_METHODS = b"GET, POST, DELETE"  # of all routes
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, retry-after")


class Cors:
    """ASGI middleware: answers preflight requests, and adds headers to the other responses."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        self.app = app
        self._origins = frozenset(settings.allowed_origins)
        self._methods = _joined(settings.allowed_methods) or _METHODS
        self._headers = _joined(settings.allowed_headers)  # None: any
        self._credentials = settings.allow_credentials

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        origin = _find(headers, b"origin")
        if scope["type"] != "http" or origin is None:
            await self.app(scope, receive, send)
            return
        own = self._own(origin) if self.app.state.hosts.allow(headers) else []
        if scope["method"] == "OPTIONS" and _find(headers, b"access-control-request-method") is not None:
            await self._answer_preflight(headers, origin, own, send)
            return

        async def send_with(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *own, *([_EXPOSED] if own else [])]
            await send(message)

        await self.app(scope, receive, send_with)

    def refusal(
        self, method: str, path: str, headers: Headers, client: Address | None
    ) -> tuple[HTTPException, str] | None:
        """Like `App.refusal`, but a browser's request takes the normal path, which adds the CORS headers."""
        return self.app.refusal(method, path, headers, client) if _find(headers, b"origin") is None else None

    def _own(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        """The headers for an origin; empty if it is not allowed."""
        any_origin = "*" in self._origins
        if not any_origin and origin.decode("latin-1") not in self._origins:
            return []
        if any_origin:
            return [(b"access-control-allow-origin", b"*")]  # without credentials: browsers forbid both together
        own = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        return [*own, (b"access-control-allow-credentials", b"true")] if self._credentials else own

    async def _answer_preflight(
        self, headers: Headers, origin: bytes, own: list[tuple[bytes, bytes]], send: Send
    ) -> None:
        body, status = b"", 204
        if own:
            wanted = _find(headers, b"access-control-request-headers") or b""
            own = [
                *own,
                (b"access-control-allow-methods", self._methods),
                (b"access-control-allow-headers", wanted if self._headers is None else self._headers),
                (b"access-control-max-age", _MAX_AGE),
            ]
        else:
            error = self._refused(headers, origin)
            body, status, own = error.body(), error.status, [(b"content-type", b"application/json")]
        if body:
            own.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": own})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _refused(self, headers: Headers, origin: bytes) -> HTTPException:
        try:
            self.app.state.hosts.check(headers)
        except HTTPException as error:
            return error
        shown = origin.decode("latin-1")
        return HTTPException(403, f"the origin {shown} is not allowed; add it by --allowed-origins")


def _joined(given: list[str]) -> bytes | None:
    return None if not given or "*" in given else ", ".join(given).encode()


def _find(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


# Watchdog: detects an engine that was sent requests and sends no messages.


class Watchdog:
    """When the core has sent nothing for `seconds` since it had requests, the stacks of both processes are logged and
    /health returns 503, until the core sends a message again."""

    def __init__(self, state: State, seconds: float) -> None:
        self.state = state
        self.seconds = seconds
        self._owed_since: float | None = None  # monotonic seconds since when the core owes a message

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.seconds / 4))
            with self.state.counters.turns.turn("watchdog"):
                self.check(time.monotonic())

    def check(self, now: float) -> None:
        engine = self.state.engine
        if engine.failure is not None or engine.pulse.is_asleep:
            self._owed_since = self.state.stalled = None
            return
        if self._owed_since is None or engine.last_message_time > self._owed_since:
            self._owed_since = now if engine.load.num_open else None
        # without open requests it stays set: the core answers the abort of a request with statistics
        silent = 0.0 if self._owed_since is None else now - self._owed_since
        if silent < self.seconds:
            self.state.stalled = None
        elif self.state.stalled is None:
            self.state.stalled = f"the engine has had requests and has sent nothing for {silent:.0f} s"
            log.error("%s; stacks follow", self.state.stalled)
            self._dump_stacks()

    def _dump_stacks(self) -> None:
        faulthandler.dump_traceback(all_threads=True)
        for pid in self.state.engine.core_pids().values():
            try:
                os.kill(pid, signal.SIGUSR1)  # faulthandler of the core writes its stacks
            except ProcessLookupError:
                pass  # it has exited; the closed socket will be noticed
