"""Hub: the core's end of the sockets, one for each front end.

All of it happens between steps, in the core's own thread: whoever has sent something is read, and what does not fit a
front end's socket is kept for it. So the core waits for nobody but, when it has nothing to do, for a message.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterable, Sequence

from slipstream.engine.link.wire import FromCore, ToCore, WireError, frame, to_core_frames

_READ = 2**18  # bytes at once


class Connection:
    """One front end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.frames = to_core_frames()
        self.unsent = bytearray()


class Hub:
    def __init__(self, socks: Iterable[socket.socket]) -> None:
        self._selector = selectors.DefaultSelector()
        self.connections: list[Connection] = []
        for sock in socks:
            connection = Connection(sock)
            self.connections.append(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def receive(self, *, wait: bool) -> tuple[list[tuple[Connection, ToCore]], list[Connection]]:
        """What has come, and the front ends that have gone. With `wait` there will be something."""
        messages: list[tuple[Connection, ToCore]] = []
        gone: list[Connection] = []
        while self.connections:
            for key, events in self._selector.select(None if wait and not messages and not gone else 0):
                connection: Connection = key.data
                try:
                    if events & selectors.EVENT_WRITE:
                        self._send(connection, b"")
                    if events & selectors.EVENT_READ:
                        data = connection.sock.recv(_READ)
                        if not data:
                            raise ConnectionResetError
                        messages += [(connection, message) for message in connection.frames.push(data)]
                except BlockingIOError:
                    pass
                except (OSError, WireError):
                    self._drop(connection)
                    gone.append(connection)
            if messages or gone or not wait:
                break
        return messages, gone

    def send(self, connection: Connection, messages: Sequence[FromCore]) -> None:
        """Never waits. To a front end that has gone, nothing is sent."""
        if connection in self.connections:
            try:
                self._send(connection, frame(messages))
            except OSError:
                pass  # `receive` will notice that it has gone

    def broadcast(self, message: FromCore) -> None:
        for connection in self.connections:
            self.send(connection, [message])

    def close(self) -> None:
        """Tries once more, and for a second at most, to get rid of what is unsent: it may be the reason of our end."""
        for connection in self.connections:
            try:
                connection.sock.settimeout(1.0)
                connection.sock.sendall(connection.unsent)
            except OSError:
                pass
            connection.sock.close()
        self.connections.clear()
        self._selector.close()

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
        connection.sock.close()
