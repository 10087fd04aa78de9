"""Server: uvicorn's server with our own signal handling and our own accept loop.

uvloop accepts one connection per iteration of the event loop. Under load, iterations are long, and thousands of new
clients would wait seconds before they even get a 429. This accept loop accepts all pending connections at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from slipstream.serve.http.tls import HANDSHAKE_SECONDS

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
