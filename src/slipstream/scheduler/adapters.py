"""Adapters: which LoRA adapters are in host memory and in the device's slots, and which requests wait for one.

An adapter is read from its folder into a host buffer by a background thread, then copied to a slot on the device by the
plan that admits its first request. Buffers and slots are reused by the least recently used adapter without requests.
The device runs plans in order, so a slot may be overwritten as soon as no running request uses it.

A request waits alone: while its adapter is read, or while all slots are used by running requests of other adapters,
requests behind it are admitted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from slipstream.base.errors import UserError
from slipstream.config.adapter_config import AdapterConfig
from slipstream.contracts.request import Adapter, WaitFor
from slipstream.contracts.step import AdapterLoad, AdapterPlan, Ints
from slipstream.params.lora import LoRARequest

_WAIT = 0.005  # seconds; then the caller runs: other requests may have arrived
MAX_OVERTAKING = 256
"""Requests whose adapter is in a slot that may be admitted before an older request that waits for a slot."""


class AdapterReader(Protocol):
    def read(self, buffer: int, path: str) -> bytes:
        """Read the adapter of a folder into a host buffer. Returns the digest of its matrices, by which prefixes are
        cached. In a background thread; raises UserError."""


def check_adapter(lora: LoRARequest | None, adapters: Adapters[Any] | None) -> None:
    if lora is not None and adapters is None:
        raise UserError(f"this engine has no adapters, and the request asks for {lora.lora_name}; set enable_lora")


class HasAdapter(Protocol):
    """A request of either scheduler."""

    lora: LoRARequest | None
    adapter: Adapter | None


R = TypeVar("R", bound=HasAdapter)


class Adapters(Generic[R]):
    def __init__(self, config: AdapterConfig, reader: AdapterReader, num_rows: int) -> None:
        self.config = config
        self._reader = reader
        self._known: dict[LoRARequest, Adapter] = {}
        self._unread: deque[Adapter] = deque()  # no host buffer was free
        self._reading: list[Adapter] = []
        self._idle: OrderedDict[Adapter, None] = OrderedDict()  # read, without requests; the oldest first
        self._free_buffers = list(range(config.max_cpu_loras - 1, -1, -1))
        # slots, the least recently used first, and the adapter in each
        self._slots: OrderedDict[int, Adapter | None] = OrderedDict.fromkeys(range(config.max_loras))
        self._parked: dict[Adapter, None] = {}  # adapters with requests that wait for a slot, in order
        self._num_overtaking = 0  # requests admitted since the first of them waits
        self._loads: list[AdapterLoad] = []
        self._slot_of_row: Ints = np.full(num_rows, -1, np.int32)
        self._num_running = 0
        self._pool: ThreadPoolExecutor | None = None
        self._finished = threading.Event()

    # Reading

    @property
    def is_waiting(self) -> bool:
        """Whether a background thread reads an adapter."""
        return bool(self._reading)

    def wait(self) -> None:
        """Wait until an adapter is read, for a few milliseconds at most."""
        if self._finished.wait(_WAIT):
            self._finished.clear()

    def enter(self, requests: Sequence[R]) -> WaitFor:
        """Take the samples of a new request. Returns what they must wait for."""
        lora = requests[0].lora
        if lora is None:
            return WaitFor.NOTHING
        adapter = self._known.get(lora)
        if adapter is None:
            adapter = self._known[lora] = Adapter(lora)
            self._unread.append(adapter)
        adapter.num_live += len(requests)
        self._idle.pop(adapter, None)
        for request in requests:
            request.adapter = adapter
        if adapter.is_read:
            return WaitFor.NOTHING
        adapter.waiting |= dict.fromkeys(requests)
        self._start_reading()
        return WaitFor.ADAPTER

    def leave(self, request: R) -> None:
        """The request has ended. It holds no row."""
        adapter = request.adapter
        if adapter is None:
            return
        adapter.waiting.pop(request, None)
        if not adapter.waiting:
            self._parked.pop(adapter, None)
        adapter.num_live -= 1
        if adapter.num_live:
            return
        if adapter.is_read:
            self._idle[adapter] = None
        elif adapter.job is None:
            self._unread.remove(adapter)
            del self._known[adapter.lora]
        self._start_reading()

    def _start_reading(self) -> None:
        while self._unread and (buffer := self._take_buffer()) is not None:
            adapter = self._unread.popleft()
            adapter.buffer = buffer
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "slipstream-adapters")
            adapter.job = self._pool.submit(self._read, buffer, adapter.lora.lora_path)
            self._reading.append(adapter)

    def _read(self, buffer: int, path: str) -> bytes:
        try:
            return self._reader.read(buffer, path)
        finally:
            self._finished.set()

    def _take_buffer(self) -> int | None:
        if self._free_buffers:
            return self._free_buffers.pop()
        if not self._idle:
            return None
        adapter, _ = self._idle.popitem(last=False)
        return self._forget(adapter)

    def _forget(self, adapter: Adapter) -> int:
        """Drop an adapter without requests. Returns its buffer."""
        del self._known[adapter.lora]
        if adapter.slot >= 0:
            self._slots[adapter.slot] = None
            self._slots.move_to_end(adapter.slot, last=False)
        return adapter.buffer

    def take_read(self) -> Iterator[tuple[list[R], UserError | None]]:
        """Requests whose adapter has been read since the last call, or could not be read. Their caller ends the
        latter."""
        reading, self._reading = self._reading, []
        for adapter in reading:
            assert adapter.job is not None
            if not adapter.job.done():
                self._reading.append(adapter)
                continue
            error = adapter.job.exception()
            waiting: list[R] = list(adapter.waiting)
            if error is None:
                adapter.digest, adapter.is_read = adapter.job.result(), True
                adapter.waiting.clear()
                if not adapter.num_live:
                    self._idle[adapter] = None
                yield waiting, None
                continue
            if not isinstance(error, UserError):
                raise error
            self._free_buffers.append(self._forget(adapter))
            for request in waiting:  # all its requests: none has run
                request.adapter = None
            yield waiting, error
        self._start_reading()

    # Slots

    def can_admit(self, request: R) -> bool:
        """Whether the adapter of a request is in a slot, or can be. If not, the request waits for a slot."""
        adapter = request.adapter
        if adapter is None:
            return True
        if adapter.slot >= 0:
            if not self._parked or self._num_overtaking < MAX_OVERTAKING:
                return True
        elif self._free_slot() is not None:
            return True
        adapter.waiting[request] = None
        self._parked.setdefault(adapter)
        return False

    def take_unparked(self) -> list[R]:
        """Requests that waited for a slot and can be admitted now, the adapter that waited longest first."""
        if not self._parked:
            return []
        num_free = sum(adapter is None or not adapter.num_running for adapter in self._slots.values())
        ready: list[R] = []
        for adapter in list(self._parked):
            if adapter.slot < 0 or not adapter.num_running:
                if not num_free:
                    break
                num_free -= 1
            del self._parked[adapter]
            ready += adapter.waiting
            adapter.waiting.clear()
            self._num_overtaking = 0
        return ready

    def admit(self, request: R, row: int = -1) -> bool:
        """Bring the adapter of a request to a slot, and keep it there until `release`. `row`: of a request that has
        one. False if all slots are in use, which `can_admit` rules out."""
        adapter = request.adapter
        if adapter is None:
            return True
        if adapter.slot < 0:
            slot = self._free_slot()
            if slot is None:
                return False
            if (before := self._slots[slot]) is not None:
                before.slot = -1
            self._slots[slot], adapter.slot = adapter, slot
            lora = adapter.lora
            self._loads.append(AdapterLoad(slot, adapter.buffer, lora.lora_name, lora.lora_path, adapter.digest))
        elif self._parked:
            self._num_overtaking += 1
        self._slots.move_to_end(adapter.slot)
        adapter.num_running += 1
        self._num_running += 1
        if row >= 0:
            self._slot_of_row[row] = adapter.slot
        return True

    def release(self, request: R, row: int = -1) -> None:
        """The request's row is released: later plans do not compute it."""
        adapter = request.adapter
        if adapter is None:
            return
        adapter.num_running -= 1
        self._num_running -= 1
        if row >= 0:
            self._slot_of_row[row] = -1

    def _free_slot(self) -> int | None:
        """The slot used least recently by an adapter that no running request has."""
        return next((slot for slot, own in self._slots.items() if own is None or not own.num_running), None)

    def plan(self, rows: Ints) -> AdapterPlan | None:
        """The adapters of a plan with these rows."""
        return self.plan_slots(self._slot_of_row[rows]) if self._num_running or self._loads else None

    def plan_slots(self, slots: Ints) -> AdapterPlan | None:
        """The adapters of a plan whose rows have adapters in these slots."""
        loads, self._loads = tuple(self._loads), []
        has_adapters = bool((slots >= 0).any())
        return AdapterPlan(slots if has_adapters else None, loads) if has_adapters or loads else None

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of adapters with running requests, and of those with requests that wait."""
        used = [adapter for adapter in self._known.values() if adapter.num_live]
        running = {adapter.lora.lora_name for adapter in used if adapter.num_running}
        waiting = {adapter.lora.lora_name for adapter in used if adapter.num_live > adapter.num_running}
        return tuple(sorted(running)), tuple(sorted(waiting))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def check(self, live: Sequence[R]) -> None:
        """Assert the invariants. `live`: all requests that have not ended. For tests."""
        for adapter in self._known.values():
            own = [request for request in live if request.adapter is adapter]
            assert adapter.num_live == len(own), f"{adapter.lora} counts {adapter.num_live} requests, has {own}"
            assert all(request in own for request in adapter.waiting), f"an ended request waits for {adapter.lora}"
            assert 0 <= adapter.num_running <= adapter.num_live or not adapter.num_live
            assert adapter.slot < 0 or self._slots[adapter.slot] is adapter
        buffers = [adapter.buffer for adapter in self._known.values() if adapter.buffer >= 0]
        assert sorted(buffers + self._free_buffers) == list(range(self.config.max_cpu_loras)), "a buffer is lost"
        in_slots = [adapter for adapter in self._slots.values() if adapter is not None]
        assert len(set(in_slots)) == len(in_slots) and all(self._known[each.lora] is each for each in in_slots)
