"""PageMover: one rank's part of the exchange of pages with other engines.

It serves its parts of pages, and fetches those of the same rank of other engines into slots of the second cache tier.
Bytes are received over TCP into the pinned memory of their slots, or copied there from the memory of an engine of this
host, or from its device to the slots of this one. A page has arrived if its checksum is right, or if it was copied from
a device; whatever else happens is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from slipstream.config.config import TransferConfig
from slipstream.handoff.server import Index, PageMemory, PageServer
from slipstream.handoff.shared_pages import DeviceSlots, MappedMemory, PeerSlots
from slipstream.handoff.wire import (
    GRANTED,
    HEADER,
    Handshake,
    Leased,
    PageTransport,
    Take,
    checksum,
    receive,
    receive_into,
    receive_message,
    send_message,
)

log = logging.getLogger(__name__)

_REST_SECONDS = 5.0  # that a peer which failed is not asked
_CONNECT_SECONDS = 1.0
POLL = 0.0005


class Copies(Protocol):
    """Copies of the device that were queued before some moment."""

    def done(self) -> bool: ...


class MoverMemory(PageMemory, Protocol):
    def mark(self) -> Copies: ...


class Fetch(msgspec.Struct, array_like=True):
    """Pages that all ranks of an engine fetch, each its part."""

    addresses: list[tuple[str, int]]  # of the ranks of the producer
    timeout: float  # seconds
    pages: list[Leased]
    slots: list[int]  # own ones, by page
    token: bytes


class PageMover:
    def __init__(
        self,
        transfer: TransferConfig,
        memory: MoverMemory,
        secret: bytes,
        rank: int = 0,
        node: str = "",
        index: Index | None = None,
    ) -> None:
        """`secret`, `index`: as of PageServer. `node`: where the rank is; "": at the host of rank 0."""
        self.rank = rank
        self.memory = memory
        self._peers: dict[tuple[str, int], Peer] = {}
        self.server: PageServer | None = None
        self.address = node, 0
        """Where the rank serves its parts."""
        if transfer.listen is not None:
            host, port = transfer.listen
            self.server = PageServer((node or host, port + rank if port else 0), rank, memory, secret, index)
            self.address = node, self.server.port

    def peer(self, address: tuple[str, int]) -> Peer:
        """The rank of another engine that serves pages there."""
        return self._peers.setdefault(address, Peer(address, self.memory.mirror))

    def fetch(self, fetch: Fetch, deadline: float) -> list[bool]:
        """Writes the content of pages to their slots. Returns which of them arrived whole. Does not raise for failures
        of a peer. No slot is written when this has returned, soon after the deadline at the latest."""
        arrived = [False] * len(fetch.pages)
        peer = self.peer(fetch.addresses[self.rank])
        if not peer.is_resting:
            try:
                self._take(peer, fetch, arrived, deadline)
            except (OSError, msgspec.MsgspecError) as error:
                peer.rest(error, self.rank)
        return arrived

    def _take(self, peer: Peer, fetch: Fetch, arrived: list[bool], deadline: float) -> None:
        with peer.connected(deadline) as connection:
            left = max(deadline - time.monotonic(), POLL)
            connection.socket.settimeout(left)
            send_message(connection.socket, Take(self.rank, left, fetch.pages, fetch.token, connection.transport))
            if receive(connection.socket, 1, deadline) != GRANTED:
                raise ConnectionError("it is another rank, or has not leased the pages")
            receive_pages(connection, fetch.pages, fetch.slots, self.memory, arrived, deadline)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for peer in self._peers.values():
            peer.close()


def wait_until(is_true: Callable[[], bool], deadline: float) -> bool:
    """False: not until the deadline."""
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


# Peer: connections to the page server of a rank of another engine.


class PeerConnection(NamedTuple):
    socket: socket.socket
    memory: MappedMemory | None  # of the peer, if it is on this host
    device: PeerSlots | None = None  # the same in the memory of its device, if this one can reach it

    @property
    def transport(self) -> PageTransport:
        if self.device is not None:
            return PageTransport.DEVICE
        return PageTransport.TCP if self.memory is None else PageTransport.MEMORY


class Peer:
    """Threads take a connection each."""

    def __init__(self, address: tuple[str, int], mirror: DeviceSlots | None = None) -> None:
        """`mirror`: own slots of the device; None: pages do not pass from device to device."""
        self.address = address
        self._mirror = mirror
        self._rests_until = 0.0  # on the clock of time.monotonic
        self._idle: queue.SimpleQueue[PeerConnection] = queue.SimpleQueue()
        # the name of the peer's memory, and where it is
        self._mapped: tuple[str, MappedMemory | None, PeerSlots | None] = "", None, None
        self._mapping = threading.Lock()

    @property
    def is_resting(self) -> bool:
        """Whether it has just failed, and is not asked."""
        return time.monotonic() < self._rests_until

    def rest(self, error: Exception, rank: int) -> None:
        """It has failed, with an error on this rank."""
        self._rests_until = time.monotonic() + _REST_SECONDS
        text = "pages of %s:%d did not arrive on rank %d, so prompts are computed: %s"
        log.warning(text, *self.address, rank, error)

    @contextlib.contextmanager
    def connected(self, deadline: float) -> Iterator[PeerConnection]:
        """A connection, which is closed if the block raises. Raises OSError, or MsgspecError if the peer is something
        else."""
        connection = self._open(deadline)
        try:
            yield connection
        except BaseException:
            connection.socket.close()
            raise
        self._idle.put(connection)

    def _open(self, deadline: float) -> PeerConnection:
        while True:
            try:
                connection = self._idle.get_nowait()
            except queue.Empty:
                break
            if _is_alive(connection.socket):
                return connection
            connection.socket.close()  # the peer was started again
        left = min(deadline - time.monotonic(), _CONNECT_SECONDS)
        if left <= 0:
            raise TimeoutError("the peer is late")
        sock = socket.create_connection(self.address, left)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = receive_message(sock, Handshake, time.monotonic() + left)
        except BaseException:
            sock.close()
            raise
        with self._mapping:
            return PeerConnection(sock, *self._map(handshake.memory))

    def _map(self, name: str) -> tuple[MappedMemory | None, PeerSlots | None]:
        known, memory, device = self._mapped
        if name != known:
            memory = device = None
            try:
                memory = MappedMemory(name)
                device = None if self._mirror is None else PeerSlots(memory, self._mirror)
            except OSError as error:  # of another host, or on a device that this one cannot reach
                if memory is not None:
                    log.warning("pages of %s:%d do not pass from device to device: %s", *self.address, error)
            self._mapped = name, memory, device
        return memory, device

    def close(self) -> None:
        with self._mapping:
            self._mapped = "", None, None  # closes the memory, once no thread reads it
        while True:
            try:
                self._idle.get_nowait().socket.close()
            except queue.Empty:
                return


def receive_pages(
    connection: PeerConnection,
    leased: Sequence[Leased],
    slots: Sequence[int],
    memory: PageMemory,
    arrived: list[bool],
    deadline: float,
) -> None:
    """Write leased pages to own slots, and set `arrived` for those that are right. Raises OSError."""
    if connection.device is not None:
        sizes = [len(memory.memory_of(page.group, slot)) for page, slot in zip(leased, slots, strict=True)]
        connection.device.receive(connection.socket, leased, slots, sizes, arrived, deadline)
        return
    for index, (page, slot) in enumerate(zip(leased, slots, strict=True)):
        size, expected = HEADER.unpack(receive(connection.socket, HEADER.size, deadline))
        if not size:
            continue
        target = memory.memory_of(page.group, slot)
        if size != len(target):
            raise ConnectionError(f"a page has {size} bytes, and {len(target)} here")
        if connection.memory is None:
            receive_into(connection.socket, target, deadline)
        else:
            # numpy copies without the interpreter lock, memoryview with it
            np.copyto(
                np.frombuffer(target, np.uint8), np.frombuffer(connection.memory.page(page.group, page.slot), np.uint8)
            )
        arrived[index] = checksum(page.page_hash, target) == expected
        if memory.mirror is not None:
            memory.mirror.set_arrived(page.group, slot, on_device=False)
        if not arrived[index]:
            log.warning("a page arrived with a wrong checksum, so it is computed")


def _is_alive(connection: socket.socket) -> bool:
    """Whether an idle connection can be used: the peer has sent nothing, not even its end."""
    connection.settimeout(0)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
