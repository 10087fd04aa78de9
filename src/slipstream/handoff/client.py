"""Handoff: what one engine exchanges with others: it serves pages, fetches them, or both."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from slipstream.config.config import EngineConfig, TransferConfig
from slipstream.handoff.server import PageMemory, PageServer, RankServers
from slipstream.handoff.shared_pages import DeviceSlots, MappedMemory, PeerSlots
from slipstream.handoff.wire import (
    DONE,
    HEADER,
    LEASED,
    OTHER_RANKS,
    SAME,
    Handshake,
    Lease,
    Leased,
    PageTransport,
    Question,
    checksum,
    identity_of,
    receive,
    receive_into,
    receive_message,
    send_message,
)
from slipstream.scheduler.cache.imports import PageImports
from slipstream.scheduler.cache.tier import CacheTier, Reserved

# PageClient: fetches pages from other engines, into slots of the second cache tier.
#
# Peers are asked one after another for the pages that are still missing. Bytes are received over TCP into the pinned
# memory of their slots, or copied there from the memory of an engine of this host, or from its device to the slots of
# this one. A page counts as arrived if its checksum is right, or its lease held until it was copied, on all ranks;
# whatever else happens is a miss.

log = logging.getLogger(__name__)

_REST_SECONDS = 5.0  # that a peer which failed is not asked
_POLL = 0.0005


class Copies(Protocol):
    """Copies of the device that were queued before some moment."""

    def done(self) -> bool: ...


class ClientMemory(PageMemory, Protocol):
    def mark(self) -> Copies: ...


class RankTransfers(Protocol):
    """Transfers of the other ranks that were started."""

    def wait(self) -> list[bool]:
        """Which pages arrived on all of them. They end at the deadline at the latest, and use no slot afterwards."""


class RankClients(Protocol):
    """The other ranks, each of which fetches its part of the pages."""

    num_ranks: int

    def mark(self) -> None:
        """Called by the core when slots are reserved."""

    def start(self, host: str, lease: Lease, slots: Sequence[int], deadline: float) -> RankTransfers:
        """Fetch leased pages of the same ranks of a peer at `host` into slots."""


class PageClient:
    """A `PageSource`."""

    def __init__(
        self,
        peers: Sequence[tuple[str, int]],
        identity: str,
        memory: ClientMemory,
        ranks: RankClients | None = None,
    ) -> None:
        """`ranks`: None if one rank has the whole model."""
        self._peers = [Peer(address, memory.mirror) for address in peers]
        self._identity = identity
        self._memory = memory
        self._ranks = ranks
        self._num_ranks = 1 if ranks is None else ranks.num_ranks

    def prepare(self) -> Callable[[], bool]:
        if self._ranks is not None:
            self._ranks.mark()
        return self._memory.mark().done

    def fetch(self, pages: Sequence[Reserved], is_free: Callable[[], bool], deadline: float) -> list[bool]:
        arrived = [False] * len(pages)
        while not is_free():
            if time.monotonic() > deadline:
                return arrived
            time.sleep(_POLL)
        for peer in self._peers:
            missing = [index for index, has_arrived in enumerate(arrived) if not has_arrived]
            if not missing:
                break
            if time.monotonic() < peer.rests_until:
                continue
            try:
                self._ask(peer, pages, missing, arrived, deadline)
            except (OSError, msgspec.MsgspecError) as error:
                peer.rests_until = time.monotonic() + _REST_SECONDS
                log.warning("pages of %s:%d did not arrive, so prompts are computed: %s", *peer.address, error)
        return arrived

    def _ask(
        self, peer: Peer, pages: Sequence[Reserved], missing: Sequence[int], arrived: list[bool], deadline: float
    ) -> None:
        """Set `arrived` for pages that this peer sends. Raises OSError or MsgspecError."""
        connection = peer.open(deadline)
        # other ranks may have copied from devices where this one has not
        by_device = connection.transport is PageTransport.DEVICE or (
            self._ranks is not None and self._memory.mirror is not None
        )
        try:
            lease = self._take_lease(connection, [pages[index] for index in missing], deadline)
            own = [False] * len(lease.pages)
            slots = [pages[missing[index]].slot for index in lease.indices]
            others = None if self._ranks is None else self._ranks.start(peer.address[0], lease, slots, deadline)
            try:
                receive_pages(connection, lease.pages, slots, self._memory, own, deadline)
            finally:
                if others is not None:
                    own = [here and there for here, there in zip(own, others.wait(), strict=True)]
                if not by_device:
                    _note(arrived, missing, lease, own)
            if self._ranks is not None or connection.transport is not PageTransport.TCP:
                connection.socket.sendall(DONE)
                if receive(connection.socket, 1, deadline) != LEASED:
                    raise ConnectionError("the lease has ended")
            if by_device:
                _note(arrived, missing, lease, own)
        except BaseException:
            connection.socket.close()
            raise
        peer.keep(connection)

    def _take_lease(self, connection: PeerConnection, pages: Sequence[Reserved], deadline: float) -> Lease:
        wanted = [(page.group, page.page_hash) for page in pages]
        left = max(deadline - time.monotonic(), 0.0)
        connection.socket.settimeout(max(left, _POLL))
        send_message(connection.socket, Question(self._identity, self._num_ranks, left, wanted, connection.transport))
        answer = receive(connection.socket, 1, deadline)
        if answer == OTHER_RANKS:
            (count,) = receive(connection.socket, 1, deadline)
            raise ConnectionError(f"tensor_parallel_size is {count} there and {self._num_ranks} here; use the same")
        if answer != SAME:
            raise ConnectionError("it has another model, dtype or layout of pages")
        lease = receive_message(connection.socket, Lease, deadline)
        if not _is_answer(lease, pages, self._num_ranks):
            raise ConnectionError("its answer is for other pages")
        return lease

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


def _note(arrived: list[bool], missing: Sequence[int], lease: Lease, own: Sequence[bool]) -> None:
    """Set `arrived` for leased pages. `missing`: the pages of the question."""
    for index, has_arrived in zip(lease.indices, own, strict=True):
        arrived[missing[index]] = has_arrived


def _is_answer(lease: Lease, pages: Sequence[Reserved], num_ranks: int) -> bool:
    """Whether a lease is for some of these pages, in their order, on all ranks."""
    if len(lease.indices) != len(lease.pages) or len(lease.ranks) != num_ranks - 1:
        return False
    if any(not 0 <= index < len(pages) for index in lease.indices):
        return False
    return all(_is_same(leased, pages[index]) for index, leased in zip(lease.indices, lease.pages, strict=True))


def _is_same(leased: Leased, page: Reserved) -> bool:
    return leased.group == page.group and leased.page_hash == page.page_hash


class PageRanks(RankServers, RankClients, Protocol):
    """The other ranks of a model: `RankPages`."""

    def close(self) -> None: ...


class Handoff:
    def __init__(
        self,
        config: EngineConfig,
        transfer: TransferConfig,
        tier: CacheTier,
        memory: ClientMemory,
        ranks: PageRanks | None = None,
    ) -> None:
        """`ranks`: the other ranks of the model, if there are any."""
        identity = identity_of(config)
        self._ranks = ranks
        self.server = None if transfer.listen is None else PageServer(transfer.listen, identity, tier, memory, ranks)
        self._client: PageClient | None = None
        self.imports: PageImports | None = None
        if transfer.peers:
            self._client = PageClient(transfer.peers, identity, memory, ranks)
            self.imports = PageImports(tier, self._client, transfer.timeout)

    def close(self) -> None:
        """`imports` is closed with the other background work of the core."""
        if self.server is not None:
            self.server.close()
        if self._client is not None:
            self._client.close()
        if self._ranks is not None:
            self._ranks.close()


# Peer: connections to the page server of another engine, or of one of its ranks; and how leased pages are received.

_CONNECT_SECONDS = 1.0


class TargetMemory(Protocol):
    @property
    def mirror(self) -> DeviceSlots | None: ...
    def memory_of(self, group: int, slot: int) -> memoryview: ...


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
        self.rests_until = 0.0  # on the clock of time.monotonic: it has failed
        self._idle: queue.SimpleQueue[PeerConnection] = queue.SimpleQueue()
        # the name of the peer's memory, and where it is
        self._mapped: tuple[str, MappedMemory | None, PeerSlots | None] = "", None, None
        self._mapping = threading.Lock()

    def open(self, deadline: float) -> PeerConnection:
        """Raises OSError, or MsgspecError if the peer is something else."""
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

    def keep(self, connection: PeerConnection) -> None:
        self._idle.put(connection)

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
    memory: TargetMemory,
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
