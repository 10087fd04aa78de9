"""StepExchange: engines that share experts send each other the sizes of their next steps, over sockets between hosts.

Every joint step has a number, and every engine posts its sizes for every number once, in order. An engine posts when it
has planned a step, or when another engine has posted the number and it has nothing to compute: it then takes part with
a padding step. So there is a joint step exactly when some engine has a plan, and engines without requests sleep until
a message arrives: no message says "sleep" or "wake". Posting never waits. Reading waits only for sizes that have not
arrived when the step has to be launched; `num_waits` counts these waits. Nothing here touches the device.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from slipstream.base.errors import EngineDead
from slipstream.contracts.step import StepSizes

_MESSAGE = struct.Struct("<QIIB")  # number of the step, tokens, last tokens, flags
_LEAVES = 128  # a flag: the engine ends on purpose
_CONNECT_SECONDS = 60.0


class StepExchange:
    def __init__(self, rank: int, links: Mapping[int, socket.socket]) -> None:
        """`links`: connected sockets by the rank of the other engine."""
        self.rank = rank
        self.num_posted = 0  # joint steps for which this engine has posted
        self.num_waits = 0
        self._peers = [_Peer(other, link) for other, link in sorted(links.items())]

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when a message arrives."""
        return [peer.link.fileno() for peer in self._peers]

    def post(self, sizes: StepSizes) -> None:
        """Sends the sizes of this engine's next step."""
        flags = sizes.is_single | sizes.only_last << 1 | sizes.can_replay << 2
        data = _MESSAGE.pack(self.num_posted, sizes.tokens, sizes.last_tokens, flags)
        self.num_posted += 1
        for peer in self._peers:
            peer.send(data)

    def is_behind(self) -> bool:
        """Whether another engine has posted for a step for which this one has not."""
        self._receive()
        return any(peer.num_posted > self.num_posted for peer in self._peers)

    def has_all(self) -> bool:
        """Whether the sizes of all other engines for the oldest step that was not taken have arrived."""
        if any(not peer.sizes for peer in self._peers):
            self._receive()
        return all(peer.sizes for peer in self._peers)

    def take(self, own: StepSizes) -> StepSizes:
        """The sizes of the oldest step that was not taken, over all engines. Waits for those that are missing."""
        if not self.has_all():
            self.num_waits += 1
            while not self.has_all():
                self.sleep(None)
        for peer in self._peers:
            own = own.joined(peer.sizes.popleft())
        return own

    def sleep(self, seconds: float | None) -> None:
        """Waits until a message of an engine whose sizes are missing arrives; `seconds`: at most."""
        for peer in self._peers:
            if not peer.sizes:
                peer.check()
        select.select([peer.link for peer in self._peers if not peer.sizes], [], [], seconds)

    def check(self) -> None:
        """Raises EngineDead where another engine has ended or left."""
        for peer in self._peers:
            peer.receive()
            peer.check()

    def leave(self) -> None:
        """Notifies the other engines that this engine ends on purpose, and closes the connections."""
        for peer in self._peers:
            peer.send(_MESSAGE.pack(self.num_posted, 0, 0, _LEAVES))
            peer.link.close()

    def _receive(self) -> None:
        for peer in self._peers:
            peer.receive()


class _Peer:
    """Sizes that another engine has posted."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        link.setblocking(False)
        self.rank = rank
        self.link = link
        self.num_posted = 0
        self.sizes: deque[StepSizes] = deque()  # of steps that were not taken
        self._data = b""
        self._end: str | None = None  # how the connection ended

    def send(self, data: bytes) -> None:
        """A few messages of 17 bytes are under way at most, so the socket's buffer always has room. `receive` reports a
        lost connection, after what the other engine has posted."""
        with contextlib.suppress(ConnectionError):
            sent = self.link.send(data)
            assert sent == len(data), "the buffer of a socket between engines is full"

    def receive(self) -> None:
        """Reads what has arrived. Raises EngineDead if the other engine has ended without leaving."""
        while self._end is None:
            try:
                if data := self.link.recv(4096):
                    self._data += data
                else:
                    self._end = "has ended"
            except BlockingIOError:
                break
            except ConnectionResetError:
                pass  # the other engine had messages unread; its own can still be read
        whole = len(self._data) // _MESSAGE.size * _MESSAGE.size
        for number, tokens, last_tokens, flags in _MESSAGE.iter_unpack(self._data[:whole]):
            if flags & _LEAVES:
                self._end = "was closed"
                continue
            assert number == self.num_posted, f"rank {self.rank} posted step {number}, expected {self.num_posted}"
            self.num_posted += 1
            self.sizes.append(StepSizes(tokens, last_tokens, bool(flags & 1), bool(flags & 2), bool(flags & 4)))
        self._data = self._data[whole:]
        if self._end == "has ended":
            self.check()

    def check(self) -> None:
        """Raises EngineDead if the connection has ended, by a death or by `leave`."""
        if self._end is not None:
            raise EngineDead(f"rank {self.rank} {self._end}; it has a part of the experts, so all ranks end")


def connect_peers(rank: int, size: int, listener: socket.socket, folder: Path) -> StepExchange:
    """Connects all engines with each other. Every engine must be listening before the first calls this."""
    links: dict[int, socket.socket] = {}
    for other in range(rank):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(str(folder / f"rank-{other}"))
        link.sendall(bytes([rank]))
        links[other] = link
    deadline = time.monotonic() + _CONNECT_SECONDS
    while len(links) < size - 1:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            link, _ = listener.accept()
        except TimeoutError:
            raise EngineDead(f"only {len(links) + 1} of {size} ranks that share experts have connected") from None
        link.settimeout(_CONNECT_SECONDS)
        links[link.recv(1)[0]] = link
    listener.close()
    return StepExchange(rank, links)


def listen_for_peers(rank: int, folder: Path) -> socket.socket:
    """The socket to which ranks above this one connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / f"rank-{rank}"))
    listener.listen(256)
    return listener
