"""Staging: the only way from the host to the device.

A step writes all its data to one pinned buffer of a `HostRing`, which is copied to the device once. The buffer is
written again only after the event of that copy. What the device has already is not copied again: the same rows often
decode for many steps. A `StagedTensor` is a device tensor updated by such writes.
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
_NOTHING = bytes(_ALIGN)
_MAX_COMPARED = 1 << 15  # bytes of an upload: larger ones hold new tokens
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
}


class UploadSpan(NamedTuple):
    """The part of the step's arena that holds one array."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Upload:
    """The data that one step sends to the device: filled on the host, then sent by one copy."""

    def __init__(self, ring: HostRing, buffer: _Buffer) -> None:
        self._ring = ring
        self._buffer = buffer
        self._used = 0
        self._after: list[Callable[[], None]] = []
        self.sent: Event = PASSED  # the copy is done: the first event of a step

    def put(self, array: np.ndarray[Any, Any]) -> UploadSpan:
        """Host: copy an array to the arena."""
        start = self._used
        stop = start + array.nbytes
        assert stop <= self._ring.capacity, f"a step stages {stop} bytes, the arena holds {self._ring.capacity}"
        if array.nbytes:
            self._buffer.memory[start:stop] = array.tobytes()
        self._align(stop)
        return UploadSpan(start, stop, _TORCH[array.dtype], array.shape)

    def room(self, dtype: Any, shape: tuple[int, ...]) -> tuple[UploadSpan, np.ndarray[Any, Any]]:
        """Host: reserve a span for an array that is written in place, which saves a copy. It holds the data of an
        earlier step."""
        start, kind = self._used, np.dtype(dtype)
        stop = start + math.prod(shape) * kind.itemsize
        assert stop <= self._ring.capacity, f"a step stages {stop} bytes, the arena holds {self._ring.capacity}"
        self._align(stop)
        return UploadSpan(start, stop, _TORCH[kind], shape), self._buffer.array[start:stop].view(kind).reshape(shape)

    def _align(self, stop: int) -> None:
        """Host: the next array begins at a multiple of the alignment. The bytes between are always the same, so that
        equal arrays are equal uploads, whatever the buffer held before."""
        self._used = -(-stop // _ALIGN) * _ALIGN
        if stop < self._used:
            self._buffer.memory[stop : self._used] = _NOTHING[: self._used - stop]

    def then(self, work: Callable[[], None]) -> None:
        """Host: run `work` on the stream, after the copy and after all work added before."""
        self._after.append(work)

    def tensor(self, span: UploadSpan) -> torch.Tensor:
        """Device: the array of this span. Valid for this step only."""
        return self._ring.arena[span.start : span.stop].view(span.dtype).view(span.shape)

    def guard(self, event: Event) -> None:
        """Host: work that ends before `event` copies the buffer, and not `send`."""
        self._buffer.copied = event

    def send(self, stream: Stream) -> None:
        """Host: queue the copy if the arena has other data, then all work added by `then`."""
        buffer, used, after, arena = self._buffer, self._used, self._after, self._ring.arena

        def upload() -> None:
            arena[:used].copy_(buffer.tensor[:used], non_blocking=True)

        if not self._ring.has(buffer.memory[:used]):
            stream.run(upload)
        buffer.copied = self.sent = stream.record(timed=True)
        if after:
            stream.run(lambda: _run_all(after))


def _run_all(works: list[Callable[[], None]]) -> None:
    for work in works:
        work()


class _Buffer:
    """Pinned host memory of one step in flight."""

    def __init__(self, capacity: int, device: Device) -> None:
        self.array, self.tensor = device.host_buffer(capacity)
        assert not device.can_pin or self.tensor.is_pinned(), "an upload from pageable memory would stall the host"
        self.memory: memoryview = self.array.data  # the fastest way to write to it
        self.copied: Event = PASSED


class HostRing:
    """`depth + 2` host buffers, pinned if the device supports it. No other pinned memory is used for uploads."""

    def __init__(self, num_buffers: int, capacity: int, device: Device, *, num_more: int = 0) -> None:
        """`num_more`: bytes of the arena after those that are uploaded."""
        self.capacity = -(-capacity // _ALIGN) * _ALIGN
        self.device = device
        self.buffers = [_Buffer(self.capacity, device) for _ in range(num_buffers)]
        # one device arena is enough: the device runs steps in order
        self.arena = device.zeros((self.capacity + num_more,), torch.uint8)
        self._content = b""  # the first bytes of the arena, once all queued copies are done
        self._next = 0

    def open(self) -> Upload:
        """The next buffer. Waits for its last copy, which normally ended long ago."""
        buffer = self.buffers[self._next]
        self._next = (self._next + 1) % len(self.buffers)
        buffer.copied.wait()
        self.device.before_reuse(buffer.array)
        return Upload(self, buffer)

    def has(self, data: memoryview) -> bool:
        """Host: whether the arena begins with these bytes already; if not, they are its content from now on."""
        if len(data) > _MAX_COMPARED:
            self._content = b""
            return False
        found = bytes(data)
        if self._content.startswith(found):
            return True
        self._content = found
        return False

    def forget(self) -> None:
        """Host: queued work of the device writes to the arena, so that the next upload is copied."""
        self._content = b""


class StagedTensor:
    """A device tensor [rows, ...] whose rows the host overwrites. The host never reads it back."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: Device, fill: float = 0) -> None:
        self.dtype = np.dtype(dtype)
        self.device = torch.full(shape, fill, dtype=_TORCH[self.dtype], device=device.torch_device)
        self._width = shape[1:]
        self._rows: list[int] = []
        self._values: list[Any] = []

    def write(self, row: int, value: Any) -> None:
        """Host: the value of this row from this step on. The last write of a step counts."""
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
