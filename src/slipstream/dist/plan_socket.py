"""Plans over sockets: messages of rank 0 to ranks of other nodes, with the interface of PlanRing."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence

from slipstream.base.errors import EngineDead

_HEADER = 8  # bytes of a message's length


class PlanSockets:
    """The writer's side: one socket per rank, in the order of ranks, the first for rank 1."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self._socks = list(socks)

    def write(self, kind: bytes, data: bytes = b"") -> None:
        message = b"".join([(len(data) + 1).to_bytes(_HEADER, "little"), kind, data])
        for index, sock in enumerate(self._socks):
            try:
                sock.sendall(message)
            except OSError:
                raise EngineDead(f"rank {index + 1} has ended") from None

    def wait_until_ready(self) -> int | None:
        """Waits until every reader has called `ready`. Returns a rank that has ended instead; None: all are ready."""
        for index, sock in enumerate(self._socks):
            try:
                if not sock.recv(1):
                    return index + 1
            except OSError:
                return index + 1
        return None

    def ended(self, seconds: float) -> int | None:
        """A rank whose connection has ended; waits up to `seconds` for one. Ranks send nothing once they are ready."""
        readable, _, _ = select.select(self._socks, [], [], seconds)
        return self._socks.index(readable[0]) + 1 if readable else None

    def wait_until_ended(self, seconds: float) -> None:
        """Waits until all connections have ended, `seconds` at most."""
        deadline = time.monotonic() + seconds
        for sock in self._socks:
            select.select([sock], [], [], max(0.0, deadline - time.monotonic()))

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when a connection ends."""
        return [sock.fileno() for sock in self._socks]

    def hang_up(self) -> None:
        """Ends the connections. `close` releases them."""
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


class PlanSocketReader:
    def __init__(self, sock: socket.socket, receive: Callable[[socket.socket, int], bytes | None]) -> None:
        """`receive` reads a number of bytes; None: the connection has ended."""
        self._sock = sock
        self._receive = receive

    def ready(self) -> None:
        """Notifies the writer that this rank has started."""
        self._sock.sendall(b"a")

    def read(self) -> tuple[bytes, bytes] | None:
        """The kind and the data of the next message; None: the writer has ended."""
        header = self._receive(self._sock, _HEADER)
        message = None if header is None else self._receive(self._sock, int.from_bytes(header, "little"))
        return None if message is None else (message[:1], message[1:])
