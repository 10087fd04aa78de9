"""SocketServer: the core's end of the sockets, one per front end.

It runs in the core's thread, between steps, with non-blocking sockets: data that a front end's socket does not take is
buffered. The core blocks only when it has no requests, until a message arrives.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from slipstream.base.errors import EngineClosed, EngineDead, InvalidParams, RequestTooLarge
from slipstream.transport.client import Listener
from slipstream.transport.frames import (
    MAX_FRAME,
    MAX_RESULT,
    Failed,
    FrameError,
    FromCore,
    Join,
    ToCore,
    TooLarge,
    encoded,
    frames,
    from_core_frames,
    to_core_frames,
    too_large_output,
)

_READ_SIZE = 2**18  # bytes
_MAX_SOCKETS = 16  # passed with one read


class Connection:
    """The connection of one front end, or of the supervisor of several."""

    def __init__(self, sock: socket.socket, *, is_supervisor: bool = False) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.frames = to_core_frames()
        self.unsent = bytearray()
        self.is_supervisor = is_supervisor
        self.joining: list[socket.socket] = []  # sockets of new front ends that the supervisor has sent

    def read(self) -> list[ToCore | Join]:
        """Returns the received messages. Raises OSError or FrameError if the connection is lost."""
        if self.is_supervisor:
            data, fds, _, _ = socket.recv_fds(self.sock, _READ_SIZE, _MAX_SOCKETS)
            self.joining += [socket.socket(fileno=fd) for fd in fds]
        else:
            data = self.sock.recv(_READ_SIZE)
        if not data:
            raise ConnectionResetError
        return self.frames.push(data)

    def close(self) -> None:
        for sock in (self.sock, *self.joining):
            sock.close()


class SocketServer:
    def __init__(self, socks: Iterable[socket.socket], supervisor: socket.socket | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self.connections: list[Connection] = []
        for sock in socks:
            self._add(Connection(sock))
        if supervisor is not None:
            self._add(Connection(supervisor, is_supervisor=True))

    @property
    def front_ends(self) -> list[Connection]:
        return [connection for connection in self.connections if not connection.is_supervisor]

    def join(self, supervisor: Connection) -> Connection | None:
        """Adds the connection of a front end that the supervisor has announced; None if no socket was passed."""
        if not supervisor.joining:
            return None
        connection = Connection(supervisor.joining.pop(0))
        self._add(connection)
        return connection

    def watch(self, file: int) -> None:
        """`receive` also returns when this file descriptor is readable."""
        self._selector.register(file, selectors.EVENT_READ, None)

    def receive(self, *, wait: bool) -> tuple[list[tuple[Connection, ToCore | Join]], list[Connection]]:
        """Returns the received messages and the lost connections. With `wait` it blocks until there is one, or
        until a watched file is readable."""
        messages: list[tuple[Connection, ToCore | Join]] = []
        gone: list[Connection] = []
        is_woken = False
        while self.connections:
            for key, events in self._selector.select(None if wait and not messages and not gone else 0):
                connection: Connection | None = key.data
                if connection is None:
                    is_woken = True
                    continue
                try:
                    if events & selectors.EVENT_WRITE:
                        self._send(connection, b"")
                    if events & selectors.EVENT_READ:
                        messages += [(connection, message) for message in connection.read()]
                except BlockingIOError:
                    pass
                except (OSError, FrameError):
                    self._drop(connection)
                    gone.append(connection)
            if messages or gone or is_woken or not wait:
                break
        return messages, gone

    def send(self, connection: Connection, messages: Sequence[FromCore]) -> None:
        """Sends without waiting. Does nothing if the connection is lost."""
        if connection in self.connections:
            try:
                for data in frames(messages, too_large_output):
                    self._send(connection, data)
            except OSError:
                pass  # `receive` will report the lost connection

    def broadcast(self, message: FromCore) -> None:
        for connection in self.connections:
            self.send(connection, [message])

    def close(self) -> None:
        """Sends the buffered data, for a second at most, since it may have the cause of a failure, and closes."""
        for connection in self.connections:
            try:
                connection.sock.settimeout(1.0)
                connection.sock.sendall(connection.unsent)
            except OSError:
                pass
            connection.close()
        self.connections.clear()
        self._selector.close()

    def _add(self, connection: Connection) -> None:
        self.connections.append(connection)
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def _send(self, connection: Connection, data: bytes) -> None:
        unsent = connection.unsent
        if data and not unsent:
            try:
                sent = connection.sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
            unsent += data[sent:]
            self._selector.modify(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
            return
        unsent += data
        if not data and unsent:
            try:
                del unsent[: connection.sock.send(unsent)]
            except BlockingIOError:
                return
        if not unsent:
            self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.sock)
        self.connections.remove(connection)
        connection.close()


# SocketClient: the CoreClient of a core in another process.


class SocketClient(asyncio.Protocol):
    """Messages sent in one iteration of the event loop go out as one frame."""

    max_result: int | None = MAX_RESULT

    def __init__(self) -> None:
        self._frames = from_core_frames()
        self._listener: Listener | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._outbox: list[msgspec.Raw] = []
        self._early: list[FromCore] = []  # received before `listen`
        self._error: BaseException | None = None
        self.cause: str | None = None  # the core's own message about its failure
        self._closed = asyncio.Event()

    @classmethod
    async def connect(cls, sock: socket.socket) -> SocketClient:
        """Returns a client over a connected socket: one end of a socket pair, or of TCP to a core of another node."""
        loop = asyncio.get_running_loop()
        connect = loop.create_unix_connection if sock.family == socket.AF_UNIX else loop.create_connection
        _, client = await connect(cls, sock=sock)
        return client

    @property
    def is_lost(self) -> bool:
        """Whether the core has exited or the connection is closed."""
        return self._error is not None

    def listen(self, listener: Listener) -> None:
        if self._listener is not None:
            return
        self._listener = listener
        if self._early:
            self._receive(self._early)
        if self._error is not None:
            listener.fail(self._error)

    def send(self, message: ToCore) -> None:
        # encoded here and not in `_flush`, so that an error is raised to the caller of this message only
        try:
            data = encoded(message)
        except TooLarge as error:
            raise RequestTooLarge(
                f"the request has {error.size} bytes, {MAX_FRAME} can be sent to the engine core; send less at once"
            ) from None
        except UnicodeEncodeError:
            raise InvalidParams(
                "a parameter has an unpaired surrogate, which UTF-8 cannot encode; give valid text"
            ) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidParams(f"a parameter cannot be sent to the engine core: {error}; give plain values") from None
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(data)

    async def close(self) -> None:
        if self._error is None:
            self._error = EngineClosed("the engine was closed")
        if self._transport is not None:
            self._transport.abort()  # does not wait; the core aborts all requests of this front end
            await self._closed.wait()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self._transport is not None and not self._transport.is_closing():
            for data in frames(outbox):
                self._transport.write(data)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transport does not inherit from it

    def data_received(self, data: bytes) -> None:
        try:
            self._receive(self._frames.push(data))
        except FrameError as error:
            self._fail(EngineDead(f"data of the engine core cannot be decoded: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()
        self._fail(EngineDead("the engine core has ended; see its last lines in the log"))

    def _receive(self, messages: list[FromCore]) -> None:
        if self._listener is None:
            self._early += messages
            return
        self._listener.receive(messages)
        for message in messages:
            if isinstance(message, Failed):
                self.cause = message.cause
                self._fail(message.error())

    def _fail(self, error: BaseException) -> None:
        """Reports the first failure only: later ones are its consequences."""
        if self._error is None:
            self._error = error
            if self._listener is not None:
                self._listener.fail(error)
