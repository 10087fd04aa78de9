"""AbortCalls: one front end asks that all requests of all front ends end, and learns how many did."""

from __future__ import annotations

from slipstream.transport.frames import AbortAll, AbortedAll
from slipstream.transport.socket_server import Connection, SocketServer


class AbortCalls:
    """In the core, which alone has a line to every front end. The asking one ends its own requests itself."""

    def __init__(self, hub: SocketServer) -> None:
        self._hub = hub
        self._calls: dict[str, _Call] = {}

    def ask(self, asking: Connection, message: AbortAll) -> None:
        others = [each for each in self._hub.front_ends if each is not asking]
        self._calls[message.call] = _Call(asking, set(others))
        for other in others:
            self._hub.send(other, [message])
        self._close(message.call)

    def answer(self, connection: Connection, message: AbortedAll) -> None:
        call = self._calls.get(message.call)
        if call is not None and connection in call.waiting:
            call.waiting.discard(connection)
            call.count += message.count
            self._close(message.call)

    def leave(self, gone: Connection) -> None:
        """A front end has gone: nobody waits for its answer, and it waits for nobody's."""
        for name, call in list(self._calls.items()):
            call.waiting.discard(gone)
            if call.asking is gone:
                del self._calls[name]
            else:
                self._close(name)

    def _close(self, name: str) -> None:
        call = self._calls[name]
        if not call.waiting:
            del self._calls[name]
            self._hub.send(call.asking, [AbortedAll(name, call.count)])


class _Call:
    def __init__(self, asking: Connection, waiting: set[Connection]) -> None:
        self.asking = asking
        self.waiting = waiting  # front ends that have not answered
        self.count = 0
