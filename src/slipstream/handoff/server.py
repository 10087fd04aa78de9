"""PageServer: sends pages of the second cache tier to other engines, by their hashes.

Each connection has a thread, which reads the tier's memory. Pages are pinned while they are leased, so their slots keep
their content. A page that is about to be stored is waited for; all others that the tier does not have are misses.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.handoff.shared_pages import DeviceSlots, MemoryServer
from slipstream.handoff.wire import (
    DONE,
    HEADER,
    LEASED,
    OTHER_MODEL,
    OTHER_RANKS,
    SAME,
    Handshake,
    Lease,
    Leased,
    PageTransport,
    Question,
    checksum,
    receive,
    receive_message,
    send_message,
)
from slipstream.scheduler.cache.tier import CacheTier, Stored

# PageListener: a TCP server of pages, with a thread for each connection; and how leased pages are sent.

MAX_CONNECTIONS = 64
POLL = 0.001  # seconds between two looks at a copy that is not done
IDLE = 3600.0  # seconds that a connection may wait for its next question


class PageMemory(Protocol):
    """The part of `PageTier` that threads use."""

    @property
    def mirror(self) -> DeviceSlots | None: ...
    def is_stored(self, group: int, slot: int, num_stores: int) -> bool: ...
    def memory_of(self, group: int, slot: int) -> memoryview: ...
    def shared_files(self) -> Sequence[tuple[int, int]]: ...


class PageListener(ABC):
    def __init__(self, address: tuple[str, int], identity: str, memory: PageMemory) -> None:
        """`identity`: of this engine's pages. Raises InvalidOption if the address cannot be used."""
        self.identity = identity
        self.memory = memory
        try:
            self._listener = socket.create_server(address)
        except OSError as error:
            raise InvalidOption(f"pages cannot be served at {address[0]}:{address[1]}: {error}") from None
        self.port: int = self._listener.getsockname()[1]
        self._shared = MemoryServer.open(memory.shared_files(), memory.mirror)
        self._handshake = Handshake("" if self._shared is None else self._shared.name)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.is_closed = False
        self._thread = threading.Thread(target=self._accept, name="slipstream-pages", daemon=True)
        self._thread.start()

    @abstractmethod
    def answer(self, connection: socket.socket) -> None:
        """Read a question, and answer it. Raises OSError or MsgspecError to end the connection."""

    def close(self) -> None:
        self.is_closed = True
        if self._shared is not None:
            self._shared.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while not self.is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if len(self._connections) >= MAX_CONNECTIONS or self.is_closed:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="slipstream-pages", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send_message(connection, self._handshake)
            while not self.is_closed:
                self.answer(connection)
        except (OSError, msgspec.MsgspecError):
            pass  # the peer has gone, is late, or sends something else: it computes its prompt
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def send(self, connection: socket.socket, page: Leased, deadline: float, *, transport: PageTransport) -> None:
        """Send the header and, unless the peer reads the memory itself, the bytes of a page, once its store is done."""
        mirror = self.memory.mirror
        is_stored = (
            self.memory.is_stored if transport is not PageTransport.DEVICE or mirror is None else mirror.is_written
        )
        while not is_stored(page.group, page.slot, page.num_stores):
            if self.is_closed or time.monotonic() > deadline:
                connection.sendall(HEADER.pack(0, 0))
                return
            time.sleep(POLL)
        connection.settimeout(max(deadline - time.monotonic(), POLL))
        if not self._holds(page, transport):
            connection.sendall(HEADER.pack(0, 0))
            return
        content = self.memory.memory_of(page.group, page.slot)
        sum_of = 0 if transport is PageTransport.DEVICE else checksum(page.page_hash, content)
        connection.sendall(HEADER.pack(len(content), sum_of))
        if transport is PageTransport.TCP:
            connection.sendall(content)

    def _holds(self, page: Leased, transport: PageTransport) -> bool:
        """Whether a page is where the peer looks for it. One that came from another engine is in one place only."""
        mirror = self.memory.mirror
        if mirror is None:
            return transport is not PageTransport.DEVICE
        is_present = mirror.is_on_device if transport is PageTransport.DEVICE else mirror.is_in_host
        return is_present(page.group, page.slot)


def deadline_of(timeout: float) -> float:
    """On the clock of time.monotonic; `timeout`: what a peer has sent."""
    return time.monotonic() + min(max(timeout if math.isfinite(timeout) else 0.0, 0.0), 600.0)


_GRACE = 1.0  # seconds after the deadline, at which consumers stop to read, until slots may change


class RankServers(Protocol):
    """The servers of the other ranks, which have parts of the same pages."""

    @property
    def addresses(self) -> list[tuple[str, int]]: ...
    def sign(self, pages: list[Leased]) -> bytes: ...


class PageServer(PageListener):
    def __init__(
        self,
        address: tuple[str, int],
        identity: str,
        tier: CacheTier,
        memory: PageMemory,
        ranks: RankServers | None = None,
    ) -> None:
        """`ranks`: None if one rank has the whole model."""
        self._tier = tier
        self._num_groups = tier.num_groups
        self._ranks = ranks
        super().__init__(address, identity, memory)

    @property
    def _num_ranks(self) -> int:
        return 1 if self._ranks is None else 1 + len(self._ranks.addresses)

    def answer(self, connection: socket.socket) -> None:
        question = receive_message(connection, Question, time.monotonic() + IDLE)
        if question.num_ranks != self._num_ranks:
            connection.sendall(OTHER_RANKS + bytes([self._num_ranks]))
            return
        if question.identity != self.identity:
            connection.sendall(OTHER_MODEL)
            return
        deadline = deadline_of(question.timeout)
        connection.sendall(SAME)
        pinned: list[Stored] = []
        try:
            lease = self._lease(question, pinned, deadline)
            send_message(connection, lease)
            for page in lease.pages:
                self.send(connection, page, deadline, transport=question.transport)
            # the consumer reads itself, or other ranks send their parts
            if self._ranks is not None or question.transport is not PageTransport.TCP:
                if receive(connection, 1, deadline + _GRACE) != DONE:
                    raise ConnectionError("the peer sent something else")
                connection.sendall(LEASED)
        finally:
            for stored in pinned:
                self._tier.unpin(stored)

    def _lease(self, question: Question, pinned: list[Stored], deadline: float) -> Lease:
        """The slots of the pages that the tier has. They are added to `pinned`."""
        lease = Lease([], [])
        for index, (group, page_hash) in enumerate(question.pages):
            stored = self._pin(group, page_hash, deadline) if 0 <= group < self._num_groups else None
            if stored is not None:
                pinned.append(stored)
                lease.indices.append(index)
                lease.pages.append(Leased(*stored, page_hash))
        if self._ranks is not None:
            lease.ranks = self._ranks.addresses
            lease.token = self._ranks.sign(lease.pages)
        return lease

    def _pin(self, group: int, page_hash: bytes, deadline: float) -> Stored | None:
        """The pinned slot of a page, once its store is planned; None: a miss."""
        while True:
            is_pending = self._tier.is_pending(group, page_hash)  # before `pin`: it may be stored in between
            stored = self._tier.pin(group, page_hash)
            if stored is not None:
                return stored
            if not is_pending or self.is_closed or time.monotonic() > deadline:
                return None
            time.sleep(POLL)
