"""Hand-off between engines of several ranks: every rank sends and fetches its part; failures of one rank are misses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from patience import PATIENCE
from slipstream.config.config import TransferConfig
from slipstream.handoff import mover, server
from slipstream.handoff.client import PageClient
from slipstream.handoff.mover import PageMover
from slipstream.handoff.server import Index
from slipstream.ranks.link import RankSocket
from slipstream.ranks.process import run_plans
from slipstream.ranks.ranks import RankMover
from slipstream.scheduler.cache.tier import Reserved, Stored

NUM_RANKS, NUM_SLOTS, PAGE_BYTES = 3, 8, 100
HASHES = [bytes([n]) * 16 for n in range(4)]


class Memory:
    """Slots of one rank, in the place of PageTier. Copies are done unless `is_busy`."""

    mirror = None

    def __init__(self, content: int) -> None:
        self.slots = np.full((NUM_SLOTS, PAGE_BYTES), content, np.uint8)
        self.is_busy = False

    def mark(self):
        return SimpleNamespace(done=lambda: not self.is_busy)

    def is_stored(self, group: int, slot: int, num_stores: int) -> bool:
        return num_stores <= 2

    def memory_of(self, group: int, slot: int) -> memoryview:
        return self.slots[slot].data

    def shared_files(self):
        return []


class Tier:
    """Page n of HASHES is in slot n + 2; the last one is not there."""

    num_groups = 1

    def __init__(self) -> None:
        self.num_pinned = 0

    def pin(self, group: int, page_hash: bytes) -> Stored | None:
        if page_hash == HASHES[-1]:
            return None
        self.num_pinned += 1
        return Stored(group, page_hash[0] + 2, 2)

    def unpin(self, stored: Stored) -> None:
        self.num_pinned -= 1

    def is_pending(self, group: int, page_hash: bytes) -> bool:
        return False


class Engine:
    """The ranks of one engine, all in this process."""

    def __init__(self, listen: tuple[str, int] | None, content: int, tier: Tier | None = None) -> None:
        secret = str(content).encode()
        transfer = TransferConfig(listen)
        self.memories = [Memory(content + rank) for rank in range(NUM_RANKS)]
        self.others = [PageMover(transfer, self.memories[rank], secret, rank) for rank in range(1, NUM_RANKS)]
        self.links: list[RankSocket] = []
        self.proxies: list[RankMover] = []
        for other in self.others:
            ours, theirs = map(RankSocket, socket.socketpair())
            threading.Thread(target=run_plans, args=(None, theirs, 1, None, None, other), daemon=True).start()
            self.links += ours, theirs
            self.proxies.append(RankMover(ours, other.address))
        index = Index("same", tier, [other.address for other in self.others])
        self.mover = PageMover(transfer, self.memories[0], secret, index=index)

    @property
    def slots(self):
        return [memory.slots for memory in self.memories]

    def close(self) -> None:
        for link in self.links:
            link.sock.shutdown(socket.SHUT_RDWR)
            link.sock.close()
        for each in (self.mover, *self.others):
            each.close()


@pytest.fixture
def engines():
    tier = Tier()
    producer, consumer = Engine(("127.0.0.1", 0), 10, tier), Engine(None, 0)
    peers = [("127.0.0.1", producer.mover.server.port)]
    client = PageClient(peers, "same", consumer.mover, consumer.proxies)
    yield SimpleNamespace(producer=producer, consumer=consumer, client=client, tier=tier)
    consumer.close()
    limit = time.monotonic() + PATIENCE
    while tier.num_pinned and time.monotonic() < limit:  # the server's thread sees the end of the connection
        time.sleep(0.01)
    producer.close()
    assert tier.num_pinned == 0


def fetch(engines, seconds: float = PATIENCE) -> list[bool]:
    """Pages of HASHES, to slots 0, 1, ... of the consumer."""
    pages = [Reserved(0, page_hash, slot) for slot, page_hash in enumerate(HASHES)]
    return engines.client.fetch(pages, engines.client.prepare(), time.monotonic() + seconds)


def test_every_rank_gets_its_part(engines):
    for _ in range(2):
        assert fetch(engines) == [True, True, True, False]
        for rank, slots in enumerate(engines.consumer.slots):
            assert (slots[:3] == 10 + rank).all() and (slots[3:] == rank).all()
            slots[:] = rank


def test_a_page_that_one_rank_does_not_get_is_a_miss(engines, monkeypatch):
    right = mover.receive_pages

    def lose(connection, leased, slots, memory, arrived, deadline):
        right(connection, leased, slots, memory, arrived, deadline)
        arrived[1] = arrived[1] and memory is not engines.consumer.memories[1]

    monkeypatch.setattr(mover, "receive_pages", lose)
    assert fetch(engines) == [True, False, True, False]


def test_a_rank_that_has_no_server_is_a_miss(engines, caplog):
    engines.producer.others[1].server.close()
    assert fetch(engines) == [False] * 4
    assert "did not arrive on rank 2" in caplog.text
    assert fetch(engines) == [False] * 4  # not asked for some seconds, and nothing hangs


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_rank_that_ends_is_a_miss(engines, is_waiting):
    """Before rank 0 sends it the pages, or while it fetches them."""
    memory, (link, *_) = engines.consumer.memories[1], engines.consumer.links

    def end():
        with contextlib.suppress(OSError):  # it has
            link.sock.shutdown(socket.SHUT_RDWR)

    if is_waiting:
        memory.mark = lambda: SimpleNamespace(done=end)
    else:
        end()
    assert fetch(engines, 0.5) == [False] * 4


def test_a_rank_writes_no_slot_that_is_still_copied(engines):
    engines.consumer.memories[1].is_busy = True
    assert fetch(engines, 0.05) == [False] * 4
    assert (engines.consumer.slots[1] == 1).all()


def test_a_rank_sends_only_what_rank_0_has_leased(engines, monkeypatch):
    monkeypatch.setattr(server, "sign", lambda secret, pages: secret[:1] * 16)
    for other in engines.producer.others:
        other.server._secret = b"another"
    assert fetch(engines) == [False] * 4
    assert all((slots == rank).all() for rank, slots in enumerate(engines.consumer.slots[1:], 1))


def test_another_rank_is_refused(engines):
    index = engines.producer.mover.server._index
    engines.producer.mover.server._index = index._replace(others=index.others[::-1])
    assert fetch(engines) == [False] * 4


def test_only_rank_0_is_asked_for_a_lease(engines):
    _, port = engines.producer.others[0].address
    client = PageClient([("127.0.0.1", port)], "same", engines.consumer.mover, engines.consumer.proxies)
    pages = [Reserved(0, page_hash, slot) for slot, page_hash in enumerate(HASHES)]
    assert client.fetch(pages, client.prepare(), time.monotonic() + PATIENCE) == [False] * 4
