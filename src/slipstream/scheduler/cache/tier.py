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
from slipstream.config.memory import region_checkpoints, region_pages, tier_slots
from slipstream.contracts.step import Ints, TierPlan
from slipstream.scheduler.cache.matching import Matching
from slipstream.scheduler.cache.pages import CacheKind, PagePool, real_pages
from slipstream.scheduler.cache.states import CheckpointPool, StateCache

MAX_LOAD_BYTES = 2**29
"""Loads of one plan, after which no more requests are admitted: all rows of the step wait for them (about 10 ms)."""

_NO_COPIES: Ints = np.zeros((0, 3), np.int32)


class Stored(NamedTuple):
    """A slot that must not be overwritten, until `unpin`."""

    group: int
    slot: int
    num_stores: int  # stores to this slot that were planned so far, the one with its content among them


class _Prefix(NamedTuple):
    num_pages: int
    entries: list[list[int]]  # per group, and then per page: a page, the null page, or -1 - slot


class CacheTier:
    """Threads that serve its pages to other engines call `pin`, `is_pending` and `unpin` only."""

    def __init__(
        self, config: CacheConfig, groups: Sequence[CacheKind], order: Sequence[int], states: StateCache | None = None
    ) -> None:
        """`order`: the indices of the groups, those that need the most pages first. Checkpoints of `states` have slots
        of one more group, the last."""
        self._groups = groups
        self._no_prefix = _Prefix(0, [[] for _ in groups])
        self._order = order
        self.page_size = config.page_size
        self.version = 0  # changes with `reset`
        self._lock = threading.Lock()  # held while slots are overwritten or pinned
        slots = tier_slots(config)
        self._slots = [
            TierSlots(group.pool, num, region_pages(spec))
            for group, num, spec in zip(groups, slots, config.groups, strict=False)
        ]
        self._page_bytes = [group.bytes_per_page for group in config.groups]
        self._state_slots: StateSlots | None = None
        self._border = 0  # pages between two checkpoints
        self._num_dropped = int(config.drops_last_page)  # pages of a match that are computed again
        if states is not None and config.states is not None:
            self._state_slots = StateSlots(states.pool, slots[-1], region_checkpoints(config.states))
            self._slots.append(self._state_slots)
            self._page_bytes.append(config.states.checkpoint_bytes)
            self._border = states.border // config.page_size
        self.num_hits = 0  # prompt tokens whose pages were loaded
        self.bytes_stored = 0
        self.bytes_loaded = 0

    @property
    def num_groups(self) -> int:
        return len(self._slots)

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
        prefix = self._find_prefix(matching, (num_tokens - 1) // self.page_size)
        state = 0  # a checkpoint on the device, or none
        if self._state_slots is not None:
            prefix, state = self._end_at_checkpoint(matching, prefix.num_pages)
        num_loads = int(state < 0)
        for group, entries in zip(self._groups, prefix.entries, strict=True):
            own = [page for page in entries if page > 0]
            num_missing = sum(1 for page in entries if page < 0)
            if num_missing > group.pool.num_free - group.pool.num_idle(own):
                matching.is_fetched = False
                return False
            num_loads += num_missing
        if not num_loads:
            return False
        hashes = matching.request.hashes
        length = prefix.num_pages - (self._num_dropped if self._state_slots is not None else 0)
        if state < 0:
            assert self._state_slots is not None
            if not self._state_slots.load_checkpoint(state, hashes[length - 1]):
                matching.is_fetched = False
                return False
        self.num_hits += (length - matching.num_pages) * self.page_size
        for slots, entries in zip(self._slots, prefix.entries, strict=False):
            slots.load(entries, hashes)
        return True

    def _end_at_checkpoint(self, matching: Matching, num_pages: int) -> tuple[_Prefix, int]:
        """The part of a prefix of `num_pages` pages that a model with recurrent states can continue from, and the
        checkpoint at its end, or -1 - slot; no pages if the device has as much."""
        assert self._state_slots is not None
        last = (num_pages - self._num_dropped) // self._border * self._border
        for end in range(last, matching.num_pages, -self._border):
            state = self._state_slots.find(matching.hash_at(end - 1))
            if state is not None:
                return self._find_prefix(matching, end + self._num_dropped), state
        return self._no_prefix, 0

    def _find_prefix(self, matching: Matching, limit: int) -> _Prefix:
        """The longest prefix that the device and the tier have together. Without groups it has `limit` pages: only
        checkpoints count."""
        found: list[list[int]] = [[] for _ in self._groups]
        while limit:
            agreed = limit
            for index in self._order:
                found[index] = self._groups[index].match(matching.hash_at, agreed, find=self._slots[index].find)
                agreed = len(found[index])
            if all(len(entries) == agreed for entries in found):
                return _Prefix(agreed, found)
            limit = agreed
        return self._no_prefix

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
            for index, slots in enumerate(self._slots):
                missing = [page_hash for page_hash in self._needed(index, hashes) if slots.find(page_hash) is None]
                taken = slots.reserve(len(missing))
                reserved += [Reserved(index, *each) for each in zip(missing, taken, strict=False)]
        return reserved

    def _needed(self, index: int, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The hashes of a prompt's pages under which a group has something of use to continue after them. Engines take
        checkpoints at the last two borders of every prompt."""
        if index < len(self._groups):
            return hashes[self._groups[index].first_needed(len(hashes) * self.page_size) :]
        last = len(hashes) // self._border * self._border
        return [hashes[end - 1] for end in (last, last - self._border) if end > 0]

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


# TierSlots and StateSlots: which slot of the second cache tier has which page, or which checkpoint of a state.


class Reserved(NamedTuple):
    """A slot that gets the content of a page from elsewhere."""

    group: int
    page_hash: bytes
    slot: int


class TierSlots:
    """The slots of one group of pages."""

    def __init__(self, pool: PagePool | CheckpointPool, num_slots: int, max_stores: int) -> None:
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
        if isinstance(pool, PagePool):
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
        assert isinstance(pool, PagePool)
        pool.share([page for page in entries if page > 0])  # so that none of them is taken
        missing = [entry for entry, page in enumerate(entries) if page < 0]
        pages = list(entries)
        for entry, page in zip(missing, pool.take(len(missing)), strict=True):
            pages[entry] = page
            self.loads[page] = -1 - entries[entry]
            self.slot_of.move_to_end(hashes[entry])
        pool.publish([pages[entry] for entry in missing], [hashes[entry] for entry in missing])
        pool.release(real_pages(pages))

    def take_stores(self) -> list[tuple[int, int]]:
        """Pages and the slots that they are copied to. Pages that became free since the last plan still have their
        content, even if they were taken for other content: that is written by the plan under construction."""
        stores: list[tuple[int, int]] = []
        used = set(self.loads.values())
        pending, self.pending, self.loads = self.pending, {}, {}
        has_slots = True
        for page_hash, (page, num_plans) in pending.items():
            if self._is_overwritten(page, page_hash, num_plans):
                continue
            if len(stores) == self._max_stores or self._is_unwritten(num_plans):
                self.pending[page_hash] = page, num_plans
                continue
            slot = self._take_slot(used) if has_slots else None
            has_slots = slot is not None  # else all are in use: not looked at again
            if slot is not None:
                stores.append((page, slot))
                used.add(slot)
                self.num_stores[slot] += 1
                self.slot_of[page_hash] = slot
        self._num_plans += 1
        return stores

    def _is_overwritten(self, page: int, page_hash: bytes, num_plans: int) -> bool:
        """Whether an earlier plan has written other content to a page that became free after `num_plans` plans."""
        return num_plans < self._num_plans and self.pool.hash_of(page) != page_hash

    def _is_unwritten(self, num_plans: int) -> bool:
        """Whether the plan under construction writes the content, so that only a later one can store it."""
        return False

    def _take_slot(self, used: set[int]) -> int | None:
        """A slot to overwrite; `used`: slots of the copies of the same plan."""
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index] not in self.pins:
                return self._free.pop(index)
        for _ in range(len(self.slot_of)):
            page_hash, slot = self.slot_of.popitem(last=False)
            if slot not in used and slot not in self.pins:
                return slot
            self.slot_of[page_hash] = slot  # in use, so the most recently used
        return None

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


class StateSlots(TierSlots):
    """The slots of checkpoints of recurrent states. Checkpoints of prompts are stored once they are saved, those after
    generated tokens when their request ends."""

    pool: CheckpointPool

    def __init__(self, pool: CheckpointPool, num_slots: int, max_stores: int) -> None:
        super().__init__(pool, num_slots, max_stores)
        pool.on_keep = self._note_free

    def load_checkpoint(self, entry: int, page_hash: bytes) -> bool:
        """Take a checkpoint for a state that is in a slot (-1 - slot), and publish it. False: the plan under
        construction uses all checkpoints."""
        checkpoint = self.pool.take_for_load(self.loads, page_hash)
        if checkpoint is None:
            return False
        self.loads[checkpoint] = -1 - entry
        self.slot_of.move_to_end(page_hash)
        return True

    def _is_overwritten(self, page: int, page_hash: bytes, num_plans: int) -> bool:
        return self.pool.hash_of(page) != page_hash

    def _is_unwritten(self, num_plans: int) -> bool:
        return num_plans == self._num_plans
