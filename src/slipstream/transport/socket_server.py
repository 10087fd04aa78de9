"""SocketServer: the core's end of the sockets, one per front end.

It runs in the core's thread, between steps, with non-blocking sockets: data that a front end's socket does not take is
buffered. The core blocks only when it has no requests, until a message arrives.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterable, Sequence

from slipstream.transport.frames import FrameError, FromCore, Join, ToCore, frames, to_core_frames, too_large_output

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
