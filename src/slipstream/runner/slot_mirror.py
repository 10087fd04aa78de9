"""SlotMirror: a copy of the second tier's slots in device memory, which engines of the same host open and copy from.

Pages are gathered to their slots and scattered from them on the compute stream, where they are read and written, so
these copies are in the order of the plans. A stored page is then copied to the host's slot on the stream of the tier,
for peers that cannot open the device's memory. A page that came from such a peer is in the host's slot only, and is
copied to the device's when it is loaded; a page that came from a device is in the device's slot only.

A slot is written here after the copies of its former content: to pages by the order of the compute stream, or for a
reserved slot by `PageTier.mark`; to peers because a pinned slot gets no other content. A copy to the host that reads
content of the next store is followed by the copy of that store, and nothing reads the host's slot in between.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from slipstream.device.device import Bytes, Device
from slipstream.device.peer_memory import ByteCopy, PeerMemory
from slipstream.device.streams import PASSED, Event, Stream
from slipstream.runner.staging import Upload, UploadSpan

_ALIGN = 512  # bytes

LOADED_AT_ONCE = 4
"""Times as many pages are scattered at once as through a region."""

Copy = Callable[[int, Upload, UploadSpan, int, Sequence[int]], None]
"""Queue copies of a group's pages: its number, the uploaded pages and slots [2, n], the first of them, the slots."""


class Marks(NamedTuple):
    """The end of all copies so far, on both streams."""

    of_tier: Event
    of_compute: Event

    def done(self) -> bool:
        return self.of_tier.done() and self.of_compute.done()


@dataclass(frozen=True, slots=True)
class _Group:
    slots: GroupSlots
    start: int  # first byte in the exported memory
    memory: torch.Tensor  # device: [slots, page_bytes] uint8
    # by slot: the end of the last copy to it, and where its content is
    written: list[Event]
    on_device: list[bool]
    in_host: list[bool]


class SlotMirror:
    def __init__(self, groups: Sequence[GroupSlots], device: Device, stream: Stream) -> None:
        """`stream`: of the copies between device and host."""
        self._device = device
        self._stream = stream
        self.used: Event = PASSED  # the end of the newest copy between pages and slots
        sizes = [-(-group.memory.nbytes // _ALIGN) * _ALIGN for group in groups]
        self.starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._exported = device.export_memory(sum(sizes))
        self._groups = [self._open(*each) for each in zip(groups, self.starts, strict=True)]
        self._is_closed = False
        self._copies = threading.Lock()  # held while copies are queued, and to end that

    def _open(self, slots: GroupSlots, start: int) -> _Group:
        num, size = slots.memory.shape
        memory = self._exported.tensor[start : start + num * size].view(num, size)
        return _Group(slots, start, memory, [PASSED] * num, [False] * num, [True] * num)

    # Of the core, which queues the copies of plans

    @property
    def copiers(self) -> tuple[Copy, Copy]:
        """The functions that store and load pages."""
        return self._store, self._load

    def _store(self, number: int, own: Upload, span: UploadSpan, start: int, slots: Sequence[int]) -> None:
        group, compute, stream = self._groups[number], self._device.compute, self._stream
        host = group.slots
        compute.run(functools.partial(_gather, group, own, span, start, len(slots)))
        self.used = written = compute.record()
        stream.wait_for(written)
        stream.run(functools.partial(_copy_out, group, slots))
        stored = stream.record()
        for slot in slots:
            group.written[slot], host.stored[slot] = written, stored
            group.on_device[slot] = group.in_host[slot] = True
            host.num_stores[slot] += 1  # last: threads read it first

    def _load(self, number: int, own: Upload, span: UploadSpan, start: int, slots: Sequence[int]) -> None:
        group, compute, stream = self._groups[number], self._device.compute, self._stream
        missing = [slot for slot in slots if not group.on_device[slot]]
        if missing:  # they were reserved: nothing uses their former content
            stream.run(functools.partial(_copy_in, group, missing))
            written = stream.record()
            compute.wait_for(written)
            for slot in missing:
                group.written[slot], group.on_device[slot] = written, True
        compute.run(functools.partial(_scatter, group, own, span, start, len(slots)))
        self.used = compute.record()

    # Of threads that send and receive pages

    def give_handle(self) -> bytes:
        """The handle with which engines of the same host and user open the memory."""
        return self._exported.give_handle()

    def is_written(self, group: int, slot: int, num_stores: int) -> bool:
        """Whether so many stores to a slot of the device are done."""
        own = self._groups[group]
        return own.slots.num_stores[slot] >= num_stores and own.written[slot].done()

    def is_on_device(self, group: int, slot: int) -> bool:
        return self._groups[group].on_device[slot]

    def is_in_host(self, group: int, slot: int) -> bool:
        return self._groups[group].in_host[slot]

    def open_peer(self, handle: bytes) -> PeerMemory:
        """The memory of another engine. Raises OSError if this process cannot open it."""
        return self._device.open_memory(handle)

    def copy_from(self, peer: PeerMemory, group: int, copies: Sequence[tuple[int, int]]) -> Event:
        """Queue copies to reserved slots; `copies`: first bytes in the memory of the peer, and slots. Their end.
        Raises OSError if the engine has ended."""
        own = self._groups[group]
        size = own.slots.page_bytes
        pieces = [ByteCopy(first, own.start + slot * size, size) for first, slot in copies]
        with self._copies:
            if self._is_closed:
                raise OSError("the engine has ended")
            return peer.copy(pieces, self._exported.tensor)

    def set_arrived(self, group: int, slot: int, *, on_device: bool) -> None:
        """A page of another engine is in a reserved slot, of the device or of the host."""
        own = self._groups[group]
        own.written[slot] = PASSED
        own.on_device[slot], own.in_host[slot] = on_device, not on_device

    def close(self) -> None:
        """Frees the memory now: a garbage collection would free it, and wait for the device, in a step of another
        engine. When the streams of the core have ended."""
        with self._copies:
            self._is_closed = True
        self._exported.close()


def _gather(group: _Group, own: Upload, span: UploadSpan, start: int, num: int) -> None:
    """Device: copy pages to slots."""
    pages, slots = own.tensor(span)[:, start : start + num].unbind(0)
    for part, rows in zip(group.slots.parts, group.slots.columns(group.memory), strict=True):
        rows.index_copy_(0, slots, part.index_select(0, pages))


def _scatter(group: _Group, own: Upload, span: UploadSpan, start: int, num: int) -> None:
    """Device: copy slots to pages."""
    pages, slots = own.tensor(span)[:, start : start + num].unbind(0)
    for part, rows in zip(group.slots.parts, group.slots.columns(group.memory), strict=True):
        part.index_copy_(0, pages, rows.index_select(0, slots))


def _copy_out(group: _Group, slots: Sequence[int]) -> None:
    """Device: copy slots, which ascend, to the host."""
    for first, last in runs(slots):
        rows = slice(slots[first], slots[first] + last - first)
        group.slots.tensor[rows].copy_(group.memory[rows], non_blocking=True)


def _copy_in(group: _Group, slots: Sequence[int]) -> None:
    """Device: copy slots, which ascend, from the host."""
    for first, last in runs(slots):
        rows = slice(slots[first], slots[first] + last - first)
        group.memory[rows].copy_(group.slots.tensor[rows], non_blocking=True)


# GroupSlots: the slots of one group of pages in the host memory of the second cache tier.


@dataclass(frozen=True, slots=True)
class GroupSlots:
    parts: tuple[torch.Tensor, ...]  # device: each [pages, width] integers; a page is its rows one after another
    page_bytes: int
    max_pages: int  # that are copied at once
    memory: Bytes  # host: [slots, page_bytes]
    file: int | None  # descriptor of the same memory, if other processes may read it
    tensor: torch.Tensor  # of the same memory
    # host, by slot: how often a page was copied to it so far, and the end of the last copy
    num_stores: list[int]
    stored: list[Event]

    def columns(self, pages: torch.Tensor) -> Iterator[torch.Tensor]:
        """The columns of each part in memory of pages [n, page_bytes] uint8: each [n, width]."""
        whole = pages.view(self.parts[0].dtype)
        start = 0
        for part in self.parts:
            yield whole[:, start : start + part.shape[1]]
            start += part.shape[1]


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last index, exclusive, of each run of consecutive slots."""
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield first, index
            first = index
