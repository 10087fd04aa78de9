"""AbortCalls: lets one front end abort the requests of all front ends, and returns their number to it.

It runs in the core process, the only one with a connection to every front end.
"""

from __future__ import annotations

from slipstream.transport.frames import AbortAll, AbortedAll
from slipstream.transport.socket_server import Connection, SocketServer


class AbortCalls:
    """The front end that sends the call aborts its own requests itself."""

    def __init__(self, server: SocketServer) -> None:
        self._server = server
        self._calls: dict[str, _AbortCall] = {}

    def start(self, sender: Connection, message: AbortAll) -> None:
        """Passes the call on to the other front ends."""
        others = [each for each in self._server.front_ends if each is not sender]
        self._calls[message.call] = _AbortCall(sender, set(others))
        for other in others:
            self._server.send(other, [message])
        self._finish_if_complete(message.call)

    def reply(self, connection: Connection, message: AbortedAll) -> None:
        """Handles the reply of one front end."""
        call = self._calls.get(message.call)
        if call is not None and connection in call.waiting:
            call.waiting.discard(connection)
            call.count += message.count
            self._finish_if_complete(message.call)

    def disconnect(self, gone: Connection) -> None:
        """Drops a front end that has disconnected, as the sender of calls and among those that have to reply."""
        for name, call in list(self._calls.items()):
            call.waiting.discard(gone)
            if call.sender is gone:
                del self._calls[name]
            else:
                self._finish_if_complete(name)

    def _finish_if_complete(self, name: str) -> None:
        call = self._calls[name]
        if not call.waiting:
            del self._calls[name]
            self._server.send(call.sender, [AbortedAll(name, call.count)])


class _AbortCall:
    def __init__(self, sender: Connection, waiting: set[Connection]) -> None:
        self.sender = sender
        self.waiting = waiting  # front ends that have not replied
        self.count = 0
