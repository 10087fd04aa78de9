"""CacheTier: the index of a second place for pages, behind the prefix cache of the device.

A page that becomes free and can be found by its hash is copied to a slot of the tier (a *store*). When a request's
prefix is no longer on the device, its pages are copied from slots to free pages (a *load*), which are published under
the same hashes, so the request is an ordinary prefix hit.

Copies are part of a plan, and the device runs them in the order of the plans. So a slot may be loaded from the plan
after its store, and overwritten from the plan after its load; the host waits for neither. A page without a slot is a
miss: it is computed again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slipstream.config.config import CacheConfig
from slipstream.config.tier_size import region_pages, tier_slots
from slipstream.scheduler.cache.kind import CacheKind
from slipstream.scheduler.cache.matching import Matching
from slipstream.scheduler.cache.paged import held_pages
from slipstream.scheduler.cache.pages import PagePool
from slipstream.step import Ints, TierPlan

MAX_LOAD_BYTES = 2**29
"""Loads of one plan, after which no more requests are admitted: all rows of the step wait for them (about 10 ms)."""

_NO_COPIES: Ints = np.zeros((0, 3), np.int32)


class Reserved(NamedTuple):
    """A slot that gets the content of a page from elsewhere."""

    group: int
    page_hash: bytes
    slot: int


class Stored(NamedTuple):
    """A slot that must not be overwritten, until `unpin`."""

    group: int
    slot: int
    num_stores: int  # stores to this slot that were planned so far, the one with its content among them


class CacheTier:
    """Threads that serve its pages to other engines call `pin`, `is_pending` and `unpin` only."""

    def __init__(self, config: CacheConfig, groups: Sequence[CacheKind], order: Sequence[int]) -> None:
        """`order`: the indices of the groups, those that need the most pages first."""
        self._groups = groups
        self._order = order
        self.page_size = config.page_size
        self.version = 0  # changes with `reset`
        self._lock = threading.Lock()  # held while slots are overwritten or pinned
        slots = tier_slots(config.tier_bytes, config.groups, config.group_pages)
        self._slots = [
            _Slots(group.pool, num, region_pages(spec))
            for group, num, spec in zip(groups, slots, config.groups, strict=True)
        ]
        self._page_bytes = [group.bytes_per_page for group in config.groups]
        self.num_hits = 0  # prompt tokens whose pages were loaded
        self.bytes_stored = 0
        self.bytes_loaded = 0

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def has_enough_loads(self) -> bool:
        """Whether the plan under construction should load no more pages."""
        loads = zip(self._slots, self._page_bytes, strict=True)
        return sum(len(slots.loads) * size for slots, size in loads) >= MAX_LOAD_BYTES

    def fetch(self, matching: Matching) -> bool:
        """Plan loads of the pages behind the matched prefix of a request. Returns whether there are any: then the
        request has to be matched again. Does nothing while the device has no room for the request."""
        num_tokens = len(matching.request.tokens)
        if any(group.pages_for(num_tokens) > group.pool.num_free for group in self._groups):
            return False
        matching.is_fetched = True
        found = self._find_prefix(matching, (num_tokens - 1) // self.page_size)
        num_loads = 0
        for group, entries in zip(self._groups, found, strict=False):
            held = [page for page in entries if page > 0]
            num_missing = sum(1 for page in entries if page < 0)
            if num_missing > group.pool.num_free - group.pool.num_idle(held):
                matching.is_fetched = False
                return False
            num_loads += num_missing
        if not num_loads:
            return False
        self.num_hits += (len(found[0]) - matching.num_pages) * self.page_size
        for slots, entries in zip(self._slots, found, strict=True):
            slots.load(entries, matching.request.hashes)
        return True

    def _find_prefix(self, matching: Matching, limit: int) -> list[list[int]]:
        """Per group, the entries of the longest prefix that the device and the tier have together: a page, the null
        page, or -1 - slot."""
        found: list[list[int]] = [[] for _ in self._groups]
        while limit:
            agreed = limit
            for index in self._order:
                found[index] = self._groups[index].match(matching.hash_at, agreed, find=self._slots[index].find)
                agreed = len(found[index])
            if all(len(entries) == agreed for entries in found):
                return found
            limit = agreed
        return []

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Make the content under these hashes unfindable: it is wrong."""
        with self._lock:
            for slots in self._slots:
                for page_hash in hashes:
                    slots.forget(page_hash)

    def reset(self) -> None:
        """Make everything unfindable. Between two plans only."""
        self.version += 1
        with self._lock:
            for slots in self._slots:
                slots.reset()

    # Pages from and for other engines

    def reserve(self, hashes: Sequence[bytes]) -> list[Reserved]:
        """Slots for the pages of a prompt that neither the device nor the tier has, of at most half the tier. Their
        former content can no longer be found. `hashes`: of all its whole pages. `end_reservation` must follow."""
        reserved: list[Reserved] = []
        with self._lock:
            for index, (group, slots) in enumerate(zip(self._groups, self._slots, strict=True)):
                first = group.first_needed(len(hashes) * self.page_size)
                missing = [page_hash for page_hash in hashes[first:] if slots.find(page_hash) is None]
                taken = slots.reserve(len(missing))
                reserved += [Reserved(index, *each) for each in zip(missing, taken, strict=False)]
        return reserved

    def end_reservation(self, pages: Sequence[Reserved], arrived: Sequence[bool], version: int) -> None:
        """The slots of pages that arrived can be found, the others are free. `version`: when they were reserved."""
        with self._lock:
            for page, has_arrived in zip(pages, arrived, strict=True):
                self._slots[page.group].end_reservation(page, has_arrived and version == self.version)

    def pin(self, group: int, page_hash: bytes) -> Stored | None:
        """In any thread: the slot with this page, which is not overwritten before `unpin`; None if there is none."""
        with self._lock:
            slots = self._slots[group]
            slot = slots.slot_of.get(page_hash)
            if slot is None:
                return None
            slots.pins[slot] = slots.pins.get(slot, 0) + 1
            return Stored(group, slot, slots.num_stores[slot])

    def unpin(self, stored: Stored) -> None:
        with self._lock:
            pins = self._slots[stored.group].pins
            pins[stored.slot] -= 1
            if not pins[stored.slot]:
                del pins[stored.slot]

    def is_pending(self, group: int, page_hash: bytes) -> bool:
        """In any thread: whether a later plan will store this page."""
        return page_hash in self._slots[group].pending

    def take_plan(self) -> TierPlan | None:
        """The copies of the plan under construction, which is complete then."""
        if not any(slots.pending or slots.loads for slots in self._slots):
            return None
        stores: list[tuple[int, int, int]] = []
        loads: list[tuple[int, int, int]] = []
        for index, slots in enumerate(self._slots):
            loaded = [(index, slot, page) for page, slot in slots.loads.items()]
            with self._lock:
                stored = [(index, page, slot) for page, slot in slots.take_stores()]
            self.bytes_loaded += len(loaded) * self._page_bytes[index]
            self.bytes_stored += len(stored) * self._page_bytes[index]
            loads += loaded
            stores += stored
        if not stores and not loads:
            return None
        return TierPlan(
            np.array(stores, np.int32) if stores else _NO_COPIES, np.array(loads, np.int32) if loads else _NO_COPIES
        )

    def check(self) -> None:
        """Assert the invariants. For tests."""
        for slots in self._slots:
            slots.check()


class _Slots:
    """The slots of one group."""

    def __init__(self, pool: PagePool, num_slots: int, max_stores: int) -> None:
        """`max_stores`: in one plan."""
        self.pool = pool
        self.loads: dict[int, int] = {}  # by page: the slot that the plan under construction loads it from
        # free pages that have no slot yet, in the order in which they became free, and the number of plans at that time
        self.pending: dict[bytes, tuple[int, int]] = {}
        self.slot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self.pins: dict[int, int] = {}  # by slot: threads that read it
        self.num_stores = [0] * num_slots  # planned so far, by slot
        self._num_slots = num_slots
        self._max_stores = max_stores
        self._free = list(range(num_slots - 1, -1, -1))
        self._reserved: set[int] = set()
        self._num_plans = 0
        pool.on_free = self._note_free

    def find(self, page_hash: bytes) -> int | None:
        page = self.pool.find(page_hash)
        if page is not None:
            return page
        slot = self.slot_of.get(page_hash)
        return None if slot is None else -1 - slot

    def load(self, entries: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Take a page for each entry that is a slot, and publish it. `hashes`: of the entries."""
        pool = self.pool
        pool.share([page for page in entries if page > 0])  # so that none of them is taken
        missing = [entry for entry, page in enumerate(entries) if page < 0]
        pages = list(entries)
        for entry, page in zip(missing, pool.take(len(missing)), strict=True):
            pages[entry] = page
            self.loads[page] = -1 - entries[entry]
            self.slot_of.move_to_end(hashes[entry])
        pool.publish([pages[entry] for entry in missing], [hashes[entry] for entry in missing])
        pool.release(held_pages(pages))

    def take_stores(self) -> list[tuple[int, int]]:
        """Pages and the slots that they are copied to. Pages that became free since the last plan still have their
        content, even if they were taken for other content: that is written by the plan under construction."""
        stores: list[tuple[int, int]] = []
        used = set(self.loads.values())
        pending, self.pending, self.loads = self.pending, {}, {}
        for page_hash, (page, num_plans) in pending.items():
            if self._is_overwritten(page, page_hash, num_plans):
                continue
            if len(stores) == self._max_stores:
                self.pending[page_hash] = page, num_plans
            elif (slot := self._take_slot(used)) is not None:
                stores.append((page, slot))
                self.num_stores[slot] += 1
                self.slot_of[page_hash] = slot
        self._num_plans += 1
        return stores

    def _is_overwritten(self, page: int, page_hash: bytes, num_plans: int) -> bool:
        """Whether an earlier plan has written other content to a page that became free after `num_plans` plans."""
        return num_plans < self._num_plans and self.pool.hash_of(page) != page_hash

    def _take_slot(self, used: set[int]) -> int | None:
        """A slot to overwrite; `used`: slots that the same plan loads from."""
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index] not in self.pins:
                return self._free.pop(index)
        first = next(iter(self.slot_of.values()), None)
        if first is None or first in used or first in self.pins:
            return None
        self.slot_of.popitem(last=False)
        return first

    def reserve(self, count: int) -> list[int]:
        """Up to this many slots, and at most half of all."""
        used = set(self.loads.values())
        slots: list[int] = []
        while len(slots) < count and len(self._reserved) < self._num_slots // 2:
            slot = self._take_slot(used)
            if slot is None:
                break
            self._reserved.add(slot)
            slots.append(slot)
        return slots

    def end_reservation(self, page: Reserved, is_valid: bool) -> None:
        self._reserved.remove(page.slot)
        if is_valid and page.page_hash not in self.slot_of:
            self.slot_of[page.page_hash] = page.slot
            self.pending.pop(page.page_hash, None)
        else:
            self._free.append(page.slot)

    def _note_free(self, page: int, page_hash: bytes) -> None:
        if page_hash in self.slot_of:
            self.slot_of.move_to_end(page_hash)
        else:
            self.pending.pop(page_hash, None)
            self.pending[page_hash] = page, self._num_plans

    def forget(self, page_hash: bytes) -> None:
        slot = self.slot_of.pop(page_hash, None)
        if slot is not None:
            self._free.append(slot)
        self.pending.pop(page_hash, None)

    def reset(self) -> None:
        self._free += self.slot_of.values()
        self.slot_of.clear()
        self.pending.clear()
        self.loads.clear()

    def check(self) -> None:
        slots = [*self._free, *self.slot_of.values(), *self._reserved]
        assert sorted(slots) == list(range(self._num_slots)), f"a slot is lost or has two contents: {sorted(slots)}"
        assert not self.pending.keys() & self.slot_of.keys(), "a page that has a slot waits for one"
