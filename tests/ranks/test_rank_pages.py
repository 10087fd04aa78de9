"""Hand-off between engines of several ranks: every rank sends and fetches its part; failures of one rank are misses."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed import FileStore

from patience import PATIENCE
from slipstream.handoff.client import PageClient
from slipstream.handoff.server import PageServer
from slipstream.ranks import rank_pages
from slipstream.ranks.rank_pages import RankPages, ShardPages
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

    def __init__(self, folder, name: str, listen: tuple[str, int] | None, content: int) -> None:
        config = SimpleNamespace(transfer=SimpleNamespace(listen=listen))
        self.memories = [Memory(content + rank) for rank in range(NUM_RANKS)]
        self.shards: list[ShardPages] = []
        store = FileStore(str(folder / name), NUM_RANKS)
        groups = [SimpleNamespace(rank=r, size=NUM_RANKS, address="127.0.0.1", store=store) for r in range(NUM_RANKS)]

        def start(rank: int) -> None:
            self.shards.append(ShardPages(config, groups[rank], self.memories[rank]))

        threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(1, NUM_RANKS)]
        for thread in threads:
            thread.start()
        self.ranks = RankPages(groups[0], lambda: [shard.mark() for shard in self.shards])
        for thread in threads:
            thread.join()
        self.shards.sort(key=lambda shard: shard._rank)
        self.slots = [memory.slots for memory in self.memories]


@pytest.fixture
def engines(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_pages, "identity_of", lambda config: "same")
    producer, consumer = Engine(tmp_path, "producer", ("127.0.0.1", 0), 10), Engine(tmp_path, "consumer", None, 0)
    tier = Tier()
    server = PageServer(("127.0.0.1", 0), "same", tier, producer.memories[0], producer.ranks)
    client = PageClient([("127.0.0.1", server.port)], "same", consumer.memories[0], consumer.ranks)
    yield SimpleNamespace(producer=producer, consumer=consumer, client=client, tier=tier)
    client.close()
    limit = time.monotonic() + PATIENCE
    while tier.num_pinned and time.monotonic() < limit:  # the server's thread sees the end of the connection
        time.sleep(0.01)
    server.close()
    assert tier.num_pinned == 0
    for shard in producer.shards:
        shard.server.close()
    producer.ranks.close()
    consumer.ranks.close()


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
    right = rank_pages.receive_pages

    def lose(connection, leased, slots, memory, arrived, deadline):
        right(connection, leased, slots, memory, arrived, deadline)
        arrived[1] = False

    monkeypatch.setattr(rank_pages, "receive_pages", lose)
    assert fetch(engines) == [True, False, True, False]


def test_a_rank_that_has_no_server_is_a_miss(engines, caplog):
    engines.producer.shards[1].server.close()
    assert fetch(engines) == [False] * 4
    assert "did not arrive on rank 2" in caplog.text
    assert fetch(engines) == [False] * 4  # not asked for some seconds, and nothing hangs


def test_a_rank_writes_no_slot_that_is_still_copied(engines):
    engines.consumer.memories[1].is_busy = True
    assert fetch(engines, 0.05) == [False] * 4
    assert (engines.consumer.slots[1] == 1).all()


def test_a_rank_sends_only_what_rank_0_has_leased(engines, monkeypatch):
    monkeypatch.setattr(RankPages, "sign", lambda ranks, pages: bytes(16))
    assert fetch(engines) == [False] * 4
    assert all((slots == rank).all() for rank, slots in enumerate(engines.consumer.slots[1:], 1))


def test_another_rank_is_refused(engines, monkeypatch):
    first, second = engines.producer.ranks.addresses
    engines.producer.ranks.addresses = [second, first]
    assert fetch(engines) == [False] * 4
