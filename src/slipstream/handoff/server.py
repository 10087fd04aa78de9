"""PageServer: sends one rank's parts of pages of the second cache tier to other engines.

Each connection has a thread, which reads the tier's memory. Pages are pinned while they are leased, so their slots keep
their content. A page that is about to be stored is waited for; all others that the tier does not have are misses.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.handoff.shared_pages import DeviceSlots, MemoryServer
from slipstream.handoff.wire import (
    DONE,
    GRANTED,
    HEADER,
    LEASED,
    OTHER_RANKS,
    REFUSED,
    Ask,
    Handshake,
    Lease,
    Leased,
    PageTransport,
    Take,
    checksum,
    receive,
    receive_message,
    send_message,
    sign,
)
from slipstream.scheduler.cache.tier import CacheTier, Stored

MAX_CONNECTIONS = 128  # a transfer of rank 0 has two
POLL = 0.001  # seconds between two looks at a copy that is not done
IDLE = 3600.0  # seconds that a connection may wait for its next question
_GRACE = 1.0  # seconds after the deadline, at which consumers stop to read, until slots may change


class PageMemory(Protocol):
    """The part of `PageTier` that threads use."""

    @property
    def mirror(self) -> DeviceSlots | None: ...
    def is_stored(self, group: int, slot: int, num_stores: int) -> bool: ...
    def memory_of(self, group: int, slot: int) -> memoryview: ...
    def shared_files(self) -> Sequence[tuple[int, int]]: ...


class Index(NamedTuple):
    """The knowledge of rank 0 beside its part of the pages."""

    identity: str  # of the engine's pages
    tier: CacheTier
    others: Sequence[tuple[str, int]]  # addresses of the servers of the other ranks


class PageServer:
    def __init__(
        self, address: tuple[str, int], rank: int, memory: PageMemory, secret: bytes, index: Index | None = None
    ) -> None:
        """`secret`: of all ranks. `index`: of rank 0. Raises InvalidOption if the address cannot be used."""
        self._rank = rank
        self._secret = secret
        self._index = index
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
                self._answer(connection)
        except (OSError, msgspec.MsgspecError):
            pass  # the peer has gone, is late, or sends something else: it computes its prompt
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        """Reads a question, and answers it. Raises OSError or MsgspecError to end the connection."""
        question: Ask | Take = receive_message(connection, Ask | Take, time.monotonic() + IDLE)
        deadline = deadline_of(question.timeout)
        if isinstance(question, Take):
            token = sign(self._secret, question.pages)
            if question.rank != self._rank or not hmac.compare_digest(question.token, token):
                connection.sendall(REFUSED)
                return
            connection.sendall(GRANTED)
            for page in question.pages:
                self.send(connection, page, deadline, transport=question.transport)
        elif self._index is None:
            connection.sendall(REFUSED)
        elif question.num_ranks != (num_ranks := 1 + len(self._index.others)):
            connection.sendall(OTHER_RANKS + bytes([num_ranks]))
        elif question.identity != self._index.identity:
            connection.sendall(REFUSED)
        else:
            connection.sendall(GRANTED)
            self._lease(connection, question, self._index, deadline)

    def _lease(self, connection: socket.socket, question: Ask, index: Index, deadline: float) -> None:
        """Pins the pages that the tier has, until the consumer says that it has them."""
        tier, pinned, indices = index.tier, list[Stored](), []
        try:
            for number, (group, page_hash) in enumerate(question.pages):
                stored = self._pin(tier, group, page_hash, deadline) if 0 <= group < tier.num_groups else None
                if stored is not None:
                    pinned.append(stored)
                    indices.append(number)
            pages = [Leased(*stored, question.pages[i][1]) for stored, i in zip(pinned, indices, strict=True)]
            send_message(connection, Lease(indices, pages, list(index.others), sign(self._secret, pages)))
            if receive(connection, 1, deadline + _GRACE) != DONE:
                raise ConnectionError("the peer sent something else")
            connection.sendall(LEASED)
        finally:
            for stored in pinned:
                tier.unpin(stored)

    def _pin(self, tier: CacheTier, group: int, page_hash: bytes, deadline: float) -> Stored | None:
        """The pinned slot of a page, once its store is planned; None: a miss."""
        while True:
            is_pending = tier.is_pending(group, page_hash)  # before `pin`: it may be stored in between
            stored = tier.pin(group, page_hash)
            if stored is not None:
                return stored
            if not is_pending or self.is_closed or time.monotonic() > deadline:
                return None
            time.sleep(POLL)

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
