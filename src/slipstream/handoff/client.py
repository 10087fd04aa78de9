"""Handoff: what one engine exchanges with others: it serves pages, fetches them, or both."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from slipstream.config.config import EngineConfig, TransferConfig
from slipstream.handoff.mover import POLL, Fetch, MoverMemory, PageMover, Peer, PeerConnection, wait_until
from slipstream.handoff.server import Index
from slipstream.handoff.wire import (
    DONE,
    GRANTED,
    LEASED,
    OTHER_RANKS,
    Ask,
    Lease,
    identity_of,
    receive,
    receive_message,
    send_message,
)
from slipstream.scheduler.cache.imports import PageImports
from slipstream.scheduler.cache.tier import CacheTier, Reserved


class OtherMover(Protocol):
    """The PageMover of another rank."""

    @property
    def address(self) -> tuple[str, int]: ...

    def start(self, fetch: Fetch) -> Callable[[], list[bool]]:
        """Begins to fetch. The result waits, and returns what `PageMover.fetch` does."""


class Handoff:
    def __init__(
        self,
        config: EngineConfig,
        transfer: TransferConfig,
        tier: CacheTier,
        memory: MoverMemory,
        others: Sequence[OtherMover] = (),
        secret: bytes | None = None,
    ) -> None:
        """`others`: of the ranks above 0. `secret`: that they have, if there are any."""
        identity = identity_of(config)
        index = Index(identity, tier, [other.address for other in others])
        self._mover = PageMover(transfer, memory, secret or secrets.token_bytes(), index=index)
        self.server = self._mover.server
        self.imports: PageImports | None = None
        if transfer.peers:
            client = PageClient(transfer.peers, identity, self._mover, others)
            self.imports = PageImports(tier, client, transfer.timeout)

    def close(self) -> None:
        """`imports` is closed with the other background work of the core."""
        self._mover.close()


class PageClient:
    """A `PageSource`: fetches pages from other engines, on all ranks. They are asked one after another for the pages
    that are still missing. A page counts as arrived if it has arrived on all ranks."""

    def __init__(
        self, peers: Sequence[tuple[str, int]], identity: str, mover: PageMover, others: Sequence[OtherMover] = ()
    ) -> None:
        self._peers = [mover.peer(address) for address in peers]
        self._identity = identity
        self._mover = mover
        self._others = others

    def prepare(self) -> Callable[[], bool]:
        return self._mover.memory.mark().done

    def fetch(self, pages: Sequence[Reserved], is_free: Callable[[], bool], deadline: float) -> list[bool]:
        arrived = [False] * len(pages)
        if not wait_until(is_free, deadline):
            return arrived
        for peer in self._peers:
            missing = [index for index, has_arrived in enumerate(arrived) if not has_arrived]
            if not missing:
                break
            if not peer.is_resting:
                try:
                    self._ask(peer, pages, missing, arrived, deadline)
                except (OSError, msgspec.MsgspecError) as error:
                    peer.rest(error, self._mover.rank)
        return arrived

    def _ask(
        self, peer: Peer, pages: Sequence[Reserved], missing: Sequence[int], arrived: list[bool], deadline: float
    ) -> None:
        """Set `arrived` for pages that this peer sends. Raises OSError or MsgspecError."""
        with peer.connected(deadline) as connection:
            lease = self._take_lease(connection, [pages[index] for index in missing], deadline)
            slots = [pages[missing[index]].slot for index in lease.indices]
            addresses = [peer.address, *((host or peer.address[0], port) for host, port in lease.others)]
            fetch = Fetch(addresses, deadline - time.monotonic(), lease.pages, slots, lease.token)
            waits = [other.start(fetch) for other in self._others]
            parts = [self._mover.fetch(fetch, deadline), *(wait() for wait in waits)]
            found = [missing[index] for index, *own in zip(lease.indices, *parts, strict=True) if all(own)]
            # what was copied from a device has no checksum
            if is_checked := self._mover.memory.mirror is None:
                _set(arrived, found)
            connection.socket.sendall(DONE)
            if receive(connection.socket, 1, deadline) != LEASED:
                raise ConnectionError("the lease has ended")
            if not is_checked:
                _set(arrived, found)

    def _take_lease(self, connection: PeerConnection, pages: Sequence[Reserved], deadline: float) -> Lease:
        wanted = [(page.group, page.page_hash) for page in pages]
        num_ranks, left = 1 + len(self._others), max(deadline - time.monotonic(), POLL)
        connection.socket.settimeout(left)
        send_message(connection.socket, Ask(self._identity, num_ranks, left, wanted))
        answer = receive(connection.socket, 1, deadline)
        if answer == OTHER_RANKS:
            (count,) = receive(connection.socket, 1, deadline)
            raise ConnectionError(f"tensor_parallel_size is {count} there and {num_ranks} here; use the same")
        if answer != GRANTED:
            raise ConnectionError("it has another model, dtype or layout of pages")
        lease: Lease = receive_message(connection.socket, Lease, deadline)
        if not _is_answer(lease, pages, num_ranks):
            raise ConnectionError("its answer is for other pages")
        return lease


def _set(arrived: list[bool], indices: Sequence[int]) -> None:
    for index in indices:
        arrived[index] = True


def _is_answer(lease: Lease, pages: Sequence[Reserved], num_ranks: int) -> bool:
    """Whether a lease is for some of these pages, on all ranks."""
    if len(lease.indices) != len(lease.pages) or len(lease.others) != num_ranks - 1:
        return False
    if any(not 0 <= index < len(pages) for index in lease.indices):
        return False
    wanted = [pages[index][:2] for index in lease.indices]
    return wanted == [(leased.group, leased.page_hash) for leased in lease.pages]
