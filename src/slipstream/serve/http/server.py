"""Server: uvicorn's, but for its signals, which are ours, and for how it takes connections.

uvloop takes one connection in a turn of the event loop. Turns are short while there is little to do; under load a crowd
of new clients would wait a turn each, thousands of them for seconds, before anybody could even tell them that there is
no room. Here all that wait are taken at once.
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

_AT_ONCE = 256  # connections taken in one turn; between two turns others have theirs
_BACKLOG = 4096  # connections that the system keeps for us meanwhile, as far as it lets us
_CLOSING = 5.0  # seconds for answers to be written once nothing more comes
_CUT_OFF = 2.0  # and for handlers whose connections were cut off
_PAUSE = 0.5  # seconds until another try where the system has no room for a connection


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they begin a drain, elsewhere

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for sock in sockets or []:
            self.servers.append(Acceptor(sock, self._protocol, self._tls))  # type: ignore[arg-type]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers be written, for a while; a connection that then still does not read or write is cut off, and its
        handler ends as with any client that has gone."""
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._until_gone(_CLOSING, lambda: self.force_exit)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._until_gone(_CUT_OFF)
        for task in self.server_state.tasks:
            log.error("a handler did not end: %r", task)
            task.cancel()
        for server in self.servers:
            await server.wait_closed()

    async def _until_gone(self, seconds: float, in_a_hurry: Callable[[], bool] = lambda: False) -> None:
        """Waits for connections and handlers to end, so long and while nobody is in a hurry."""
        state, deadline = self.server_state, time.monotonic() + seconds
        while (state.connections or state.tasks) and not in_a_hurry() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class Acceptor:
    """Takes connections until it is closed."""

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
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptors left, most likely
                log.error("no connection can be taken: %s; those who wait wait on", error.strerror)
                self._loop.remove_reader(self.sock)
                self._pause = self._loop.call_later(_PAUSE, self._resume)
                return
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has gone already, or does not speak TLS
            transport, _ = await self._loop.connect_accepted_socket(self._make_protocol, connection, **self._tls)
            if self._closed:  # meanwhile, and whoever ends connections has not seen this one
                transport.close()
