"""The one way in: numbers go from the host to the device through here and nowhere else.

A step writes all it has to say into one slot of a `HostRing`, which is copied to the device once. The slot is
written again only after the event of that copy. `StagedTensor` is a device tensor kept up by such writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.device.streams import PASSED, Event, Stream

_ALIGN = 16
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
}


class Span(NamedTuple):
    """Where an array lies in the step's arena."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Upload:
    """What one step sends to the device. Filled on the host, then sent by one copy."""

    def __init__(self, ring: HostRing, slot: _Slot) -> None:
        self._ring = ring
        self._slot = slot
        self._used = 0
        self._after: list[Callable[[], None]] = []
        self.sent: Event = PASSED  # the copy was made: a step begins with it

    def put(self, array: np.ndarray[Any, Any]) -> Span:
        """Host: copy an array into the arena."""
        start = self._used
        stop = start + array.nbytes
        assert stop <= self._ring.capacity, f"a step stages {stop} bytes, the arena holds {self._ring.capacity}"
        if array.nbytes:
            self._slot.memory[start:stop] = array.tobytes()
        self._used = -(-stop // _ALIGN) * _ALIGN
        return Span(start, stop, _TORCH[array.dtype], array.shape)

    def room(self, dtype: Any, shape: tuple[int, ...]) -> tuple[Span, np.ndarray[Any, Any]]:
        """Host: a place in the arena for an array that is made there, which spares copies of a large one. It holds what
        an earlier step left."""
        start, kind = self._used, np.dtype(dtype)
        stop = start + math.prod(shape) * kind.itemsize
        assert stop <= self._ring.capacity, f"a step stages {stop} bytes, the arena holds {self._ring.capacity}"
        self._used = -(-stop // _ALIGN) * _ALIGN
        return Span(start, stop, _TORCH[kind], shape), self._slot.array[start:stop].view(kind).reshape(shape)

    def then(self, work: Callable[[], None]) -> None:
        """Host: run `work` on the stream, after the copy and after what was asked for before."""
        self._after.append(work)

    def tensor(self, span: Span) -> torch.Tensor:
        """Device: the array, as this step's closures see it. Not to be kept beyond the step."""
        return self._ring.arena[span.start : span.stop].view(span.dtype).view(span.shape)

    def send(self, stream: Stream) -> None:
        """Host: queue the copy and all that follows it."""
        slot, used, after, arena = self._slot, self._used, self._after, self._ring.arena

        def upload() -> None:
            arena[:used].copy_(slot.tensor[:used], non_blocking=True)

        stream.run(upload)
        slot.copied = self.sent = stream.record(timed=True)
        if after:
            stream.run(lambda: _run_all(after))


def _run_all(works: list[Callable[[], None]]) -> None:
    for work in works:
        work()


class _Slot:
    """Host memory of one step in flight."""

    def __init__(self, capacity: int, device: Device) -> None:
        self.array, self.tensor = device.host_buffer(capacity)
        assert not device.can_pin or self.tensor.is_pinned(), "an upload from pageable memory would stall the host"
        self.memory: memoryview = self.array.data  # the quickest way to write into it
        self.copied: Event = PASSED


class HostRing:
    """`depth + 2` slots of host memory, pinned where the device can; nobody else owns such memory for uploads."""

    def __init__(self, num_slots: int, capacity: int, device: Device) -> None:
        self.capacity = -(-capacity // _ALIGN) * _ALIGN
        self.device = device
        self.slots = [_Slot(self.capacity, device) for _ in range(num_slots)]
        # one is enough: the device runs steps in order
        self.arena = torch.zeros(self.capacity, dtype=torch.uint8, device=device.torch_device)
        self._next = 0

    def open(self) -> Upload:
        """The next slot. Its last copy has long been made, else this is where the host would find out."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        slot.copied.wait()
        self.device.handed_back(slot.array)
        return Upload(self, slot)


class StagedTensor:
    """A device tensor [rows, ...] whose rows the host rewrites now and then, never reading it back."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: Device, fill: float = 0) -> None:
        self.dtype = np.dtype(dtype)
        self.device = torch.full(shape, fill, dtype=_TORCH[self.dtype], device=device.torch_device)
        self._width = shape[1:]
        self._rows: list[int] = []
        self._values: list[Any] = []

    def write(self, row: int, value: Any) -> None:
        """Host: this row's value from this step on. The last write of a step wins."""
        self._rows.append(row)
        self._values.append(value)

    def flush(self, upload: Upload) -> None:
        if not self._rows:
            return
        latest = dict(zip(self._rows, self._values, strict=True))
        rows = upload.put(np.fromiter(latest, np.int64, len(latest)))
        values = upload.put(np.asarray(list(latest.values()), self.dtype).reshape(len(latest), *self._width))
        self._rows, self._values = [], []
        target = self.device

        def scatter() -> None:
            target.index_copy_(0, upload.tensor(rows), upload.tensor(values))

        upload.then(scatter)
