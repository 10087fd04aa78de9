"""PageTier: host memory for KV cache pages, and their copies to and from the device.

A slot holds one page of a group, over all its sites: keys and values, the scales of an FP8 cache, and the token ids
that drafts are found in. Checkpoints of recurrent states are pages of one more group, the last. Pages are gathered and
scattered on the compute stream, where they are read and written. Between the device and the slots they are copied on a
stream of their own, through two device buffers (regions). Streams wait for each other's events; the host waits for none
of them, so the copies overlap with steps that do not need them. Slots that other engines read from device memory have a
copy there, in the place of regions (`slot_mirror.py`).

All copies between regions and slots are in the order of the plans. So a slot can be loaded as soon as its store is
planned, and overwritten as soon as its load is planned.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Sequence

import numpy as np
import torch

from slipstream.base.errors import InvalidOption, NotEnoughMemory
from slipstream.config.config import CacheConfig
from slipstream.config.memory import NUM_REGIONS, region_bytes, region_checkpoints, region_pages, tier_slots
from slipstream.contracts.step import Ints, StepPlan, TierPlan
from slipstream.device.device import Bytes, Device
from slipstream.device.streams import PASSED, Event
from slipstream.ops.attention import raw_pages
from slipstream.runner.features import StepFeature
from slipstream.runner.slot_mirror import LOADED_AT_ONCE, GroupSlots, Marks, SlotMirror, runs
from slipstream.runner.staging import HostRing, Upload, UploadSpan
from slipstream.runner.stores import KVStore, StateStore

_SEAL_FUTURE_WRITE = 0x10  # of fcntl.h: what is mapped stays writable, and no process can map it so again


class _Region:
    """Device memory of pages that are being copied."""

    def __init__(self, num_bytes: int, device: Device) -> None:
        self.memory = device.zeros((num_bytes,), torch.uint8)
        self.free: Event = PASSED  # after it the memory may be written again


class PageTier(StepFeature):
    """Its uploads are read by copies on another stream, so it has a ring of its own."""

    def __init__(
        self,
        store: KVStore,
        config: CacheConfig,
        num_buffers: int,
        device: Device,
        states: StateStore | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        """`is_shared`: other processes may read the slots."""
        self._store = store
        self._states = states
        self._device = device
        self._num_buffers = num_buffers
        self._is_shared = is_shared
        self._stream = device.open_stream()
        self.mirror: SlotMirror | None = None  # of slots that other engines read from device memory
        num_regions, size = (0, 0) if config.is_mirrored else (NUM_REGIONS, region_bytes(config.groups, config.states))
        self._regions = [_Region(size, device) for _ in range(num_regions)]
        self._next_region = 0
        self._groups: list[GroupSlots] = []
        self._ring: HostRing | None = None
        self._plan: TierPlan | None = None

    def take_memory(self, config: CacheConfig) -> None:
        """Allocate the slots, once the device's cache has its size."""
        slots = tier_slots(config)
        size = config.tier_bytes / 2**30
        if not all(slots):
            need = max((group.bytes_per_page for group in config.groups), default=0)
            if config.states is not None:
                need = max(need, config.states.checkpoint_bytes)
            raise InvalidOption(
                f"kv_offloading_size is {size:g} GiB, and a page or checkpoint takes {need} bytes; give room for "
                "a page of each group and a checkpoint"
            )
        num_copies = sum(config.group_pages) + (0 if config.states is None else config.states.num_checkpoints)
        self._ring = HostRing(self._num_buffers, 2 * (16 * num_copies + 16 * len(slots)), self._device)
        try:
            self._groups = [self._open_group(number, num) for number, num in enumerate(slots[: len(config.groups)])]
            if self._states is not None and config.states is not None:
                parts = self._states.checkpoints()
                self._groups.append(self._open_slots(parts, slots[-1], region_checkpoints(config.states)))
        except (RuntimeError, MemoryError):
            raise NotEnoughMemory(
                f"kv_offloading_size is {size:g} GiB, more than the machine gives, or can pin; lower it"
            ) from None
        if config.is_mirrored:
            self.mirror = SlotMirror(self._groups, self._device, self._stream)

    def _open_group(self, number: int, num_slots: int) -> GroupSlots:
        store, group = self._store, self._store.groups[number]
        caches = [cache for site in group.sites for cache in store.caches[site][: 1 if group.spec.value_dim else 2]]
        parts = [raw_pages(cache).view(len(cache), -1).view(torch.uint8) for cache in caches]
        if store.history is not None and store.history.group == number:
            parts.append(store.history.tokens.view(torch.uint8))
        return self._open_slots(parts, num_slots, region_pages(group))

    def _open_slots(self, parts: list[torch.Tensor], num_slots: int, max_pages: int) -> GroupSlots:
        """`parts`: device: each [pages, bytes]."""
        for wide in (torch.int64, torch.int32, torch.int16):  # fewer elements to gather
            if all(part.shape[1] % wide.itemsize == 0 for part in parts):
                parts = [part.view(wide) for part in parts]
                break
        page_bytes = sum(part.shape[1] * part.itemsize for part in parts)
        memory, tensor, file = self._open_memory(num_slots * page_bytes)
        shape = (num_slots, page_bytes)
        return GroupSlots(
            tuple(parts),
            page_bytes,
            max_pages,
            memory.reshape(shape),
            file,
            tensor.view(shape),
            [0] * num_slots,
            [PASSED] * num_slots,
        )

    def _open_memory(self, num_bytes: int) -> tuple[Bytes, torch.Tensor, int | None]:
        """Host memory, as an array, as a tensor, and as a file if other processes may read it."""
        if not self._is_shared:
            return *self._device.large_host_buffer(num_bytes), None
        file = os.memfd_create("slipstream-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, num_bytes)
        memory, tensor = self._device.large_host_buffer(num_bytes, file)
        with contextlib.suppress(OSError):  # old systems: other processes of the same user could write
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | _SEAL_FUTURE_WRITE)
        return memory, tensor, file

    # For threads that send and receive pages

    def shared_files(self) -> list[tuple[int, int]]:
        """Per group the descriptor of its memory and the bytes of a page, if other processes may read it."""
        return [(group.file, group.page_bytes) for group in self._groups if group.file is not None]

    def mark(self) -> Marks:
        """Called by the core: after this, all copies to and from slots that were planned so far are done."""
        self._stream.flush()
        return Marks(self._stream.record(), PASSED if self.mirror is None else self.mirror.used)

    def is_stored(self, group: int, slot: int, num_stores: int) -> bool:
        """In any thread: whether so many stores to a slot are done."""
        slots = self._groups[group]
        return slots.num_stores[slot] >= num_stores and slots.stored[slot].done()

    def memory_of(self, group: int, slot: int) -> memoryview:
        """In any thread: the bytes of a slot."""
        return self._groups[group].memory[slot].data

    def close(self) -> None:
        """Other processes that have mapped the slots keep their content as it is."""
        for group in self._groups:
            if group.file is not None:
                os.close(group.file)
        if self.mirror is not None:
            self.mirror.close()

    def apply(self, plan: StepPlan) -> None:
        self._plan = plan.tier

    def flush(self, upload: Upload) -> None:
        """Queue the copies of the plan in front of the step, whose upload comes later on the compute stream."""
        if self._plan is not None:
            self.copy(self._plan)

    def copy(self, plan: TierPlan) -> None:
        """Queue copies, in front of the next step or without one."""
        assert self._ring is not None, "the slots have memory"
        own, compute = self._ring.open(), self._device.compute
        stores = [self._put(own, number, plan.stores, 1, 2) for number in range(len(self._groups))]
        loads = [self._put(own, number, plan.loads, 2, 1) for number in range(len(self._groups))]
        own.send(compute)
        store, load = (self._store_pages, self._load_pages) if self.mirror is None else self.mirror.copiers
        for number, (span, slots) in enumerate(stores):
            for start in range(0, len(slots), size := self._groups[number].max_pages):
                store(number, own, span, start, slots[start : start + size])
        num_regions = 1 if self.mirror is None else LOADED_AT_ONCE
        for number, (span, slots) in enumerate(loads):
            for start in range(0, len(slots), size := num_regions * self._groups[number].max_pages):
                load(number, own, span, start, slots[start : start + size])
        compute.flush()
        self._stream.flush()

    def _put(self, upload: Upload, number: int, copies: Ints, page: int, slot: int) -> tuple[UploadSpan, list[int]]:
        """Host: upload the pages of a group and their slots [2, n]. Returns the span, and the slots. `page`, `slot`:
        columns."""
        # neighbouring slots are copied at once
        chosen = sorted((copy[slot], copy[page]) for copy in copies.tolist() if copy[0] == number)
        slots = [slot for slot, _ in chosen]
        return upload.put(np.array([[page for _, page in chosen], slots], np.int64)), slots

    def _store_pages(self, number: int, own: Upload, span: UploadSpan, start: int, slots: Sequence[int]) -> None:
        group, region, compute, stream = self._groups[number], self._take_region(), self._device.compute, self._stream
        compute.wait_for(region.free)
        compute.run(functools.partial(_gather, group, region, own, span, start, len(slots)))
        stream.wait_for(compute.record())
        stream.run(functools.partial(_copy_out, group, region, slots))
        region.free = stream.record()
        for slot in slots:
            group.stored[slot] = region.free
            group.num_stores[slot] += 1

    def _load_pages(self, number: int, own: Upload, span: UploadSpan, start: int, slots: Sequence[int]) -> None:
        group, region, compute, stream = self._groups[number], self._take_region(), self._device.compute, self._stream
        stream.wait_for(region.free)
        stream.run(functools.partial(_copy_in, group, region, slots))
        compute.wait_for(stream.record())
        compute.run(functools.partial(_scatter, group, region, own, span, start, len(slots)))
        region.free = compute.record()

    def _take_region(self) -> _Region:
        region = self._regions[self._next_region]
        self._next_region = (self._next_region + 1) % len(self._regions)
        return region


def _gather(group: GroupSlots, region: _Region, own: Upload, span: UploadSpan, start: int, num: int) -> None:
    """Device: copy pages to a region."""
    pages = own.tensor(span)[0, start : start + num]
    for part, rows in zip(group.parts, group.columns(_pages(group, region, num)), strict=True):
        rows.copy_(part.index_select(0, pages))


def _scatter(group: GroupSlots, region: _Region, own: Upload, span: UploadSpan, start: int, num: int) -> None:
    """Device: copy a region to pages."""
    pages = own.tensor(span)[0, start : start + num]
    for part, rows in zip(group.parts, group.columns(_pages(group, region, num)), strict=True):
        part.index_copy_(0, pages, rows)


def _pages(group: GroupSlots, region: _Region, num: int) -> torch.Tensor:
    """The memory of `num` pages in a region [num, page_bytes]."""
    return region.memory[: num * group.page_bytes].view(num, -1)


def _copy_out(group: GroupSlots, region: _Region, slots: Sequence[int]) -> None:
    """Device: copy a region to slots, which ascend."""
    pages = _pages(group, region, len(slots))
    for first, last in runs(slots):
        group.tensor[slots[first] : slots[first] + last - first].copy_(pages[first:last], non_blocking=True)


def _copy_in(group: GroupSlots, region: _Region, slots: Sequence[int]) -> None:
    """Device: copy slots, which ascend, to a region."""
    pages = _pages(group, region, len(slots))
    for first, last in runs(slots):
        pages[first:last].copy_(group.tensor[slots[first] : slots[first] + last - first], non_blocking=True)
