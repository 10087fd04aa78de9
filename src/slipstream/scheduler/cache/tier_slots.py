"""TierSlots and StateSlots: which slot of the second cache tier has which page, or which checkpoint of a state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.scheduler.cache.checkpoints import CheckpointPool
from slipstream.scheduler.cache.paged import held_pages
from slipstream.scheduler.cache.pages import PagePool


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
        pool.release(held_pages(pages))

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
