"""PageServer: sends pages of the second cache tier to other engines, by their hashes.

Each connection has a thread, which reads the tier's memory. Pages are pinned while they are leased, so their slots keep
their content. A page that is about to be stored is waited for; all others that the tier does not have are misses.
"""

from __future__ import annotations

import socket
import time
from typing import Protocol

from slipstream.engine.page_listener import IDLE, POLL, PageListener, PageMemory, deadline_of
from slipstream.engine.page_wire import (
    DONE,
    HELD,
    OTHER_MODEL,
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
from slipstream.scheduler.cache.tier import CacheTier, Stored

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
                connection.sendall(HELD)
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
