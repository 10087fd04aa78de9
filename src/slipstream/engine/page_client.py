"""PageClient: fetches pages from other engines, into slots of the second cache tier.

Peers are asked one after another for the pages that are still missing. Bytes are received over TCP into the pinned
memory of their slots, or copied there from the memory of an engine of this host, or from its device to the slots of
this one. A page counts as arrived if its checksum is right, or its lease held until it was copied, on all ranks;
whatever else happens is a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from slipstream.engine.page_listener import PageMemory
from slipstream.engine.page_peer import Peer, PeerConnection, receive_pages
from slipstream.engine.page_wire import (
    DONE,
    HELD,
    OTHER_RANKS,
    SAME,
    Lease,
    Leased,
    PageTransport,
    Question,
    receive,
    receive_message,
    send_message,
)
from slipstream.scheduler.cache.tier import Reserved

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
                if receive(connection.socket, 1, deadline) != HELD:
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
