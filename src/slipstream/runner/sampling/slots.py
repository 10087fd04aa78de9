"""Device memory for the few rows that use a feature: rows take slots, and a table has as many as were ever needed."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.runner.batch.staging import Span, StagedTensor, Upload
from slipstream.step import Ints

_FIRST = 4  # slots and columns of a table's first size


@dataclass(frozen=True, slots=True)
class Users:
    """The sampling rows of one step that have a slot, staged: which of the step's rows, and their slots."""

    index: Span
    slots: Span
    rows: Ints


class Slots:
    """Which slot a row has, -1 if none. The smallest free one is handed out, so tables stay small."""

    def __init__(self, num_rows: int) -> None:
        self.of_row = np.full(num_rows, -1, np.int64)  # host
        self._free: list[int] = []
        self._num = 0  # ever handed out

    def __len__(self) -> int:
        """Slots in use."""
        return self._num - len(self._free)

    def take(self, row: int) -> int:
        assert self.of_row[row] < 0, f"row {row} already has slot {self.of_row[row]}"
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._num
            self._num += 1
        self._set(row, slot)
        return slot

    def _set(self, row: int, slot: int) -> None:
        self.of_row[row] = slot

    def asks(self, rows: Ints) -> bool:
        """Host: whether any of these rows has a slot."""
        return self._num > len(self._free) and bool((self.of_row[rows] >= 0).any())

    def users(self, rows: Ints, upload: Upload) -> Users | None:
        """Host: those of a step's sampling rows that have a slot; None if none has."""
        if self._num == len(self._free):
            return None
        slots = self.of_row[rows]
        index = np.flatnonzero(slots >= 0)
        if not len(index):
            return None
        return Users(upload.put(index), upload.put(slots[index]), rows[index])

    def release(self, row: int) -> None:
        """Give the row's slot back, if it has one. Safe to hand on at once: the device runs steps in order."""
        if self.of_row[row] >= 0:
            heapq.heappush(self._free, int(self.of_row[row]))
            self._set(row, -1)

    def close_up(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows that have a slot get the first ones, in the order of their slots. Returns the slots they had."""
        rows = np.flatnonzero(self.of_row >= 0)
        rows = rows[np.argsort(self.of_row[rows])]
        before = self.of_row[rows]
        for slot, row in enumerate(map(int, rows)):
            self._set(row, slot)
        self._free, self._num = [], len(rows)
        return before


class StagedSlots(Slots):
    """With a copy on the device, for work by row."""

    def __init__(self, num_rows: int, device: Device) -> None:
        super().__init__(num_rows)
        self.staged = StagedTensor((num_rows,), np.int64, device, fill=-1)

    def _set(self, row: int, slot: int) -> None:
        super()._set(row, slot)
        self.staged.write(row, slot)

    def flush(self, upload: Upload) -> None:
        self.staged.flush(upload)


class SlotTable:
    """A device tensor [slots, width, ...] that grows on the stream when the host hands out a place beyond it.

    `tensor` belongs to the stream: only closures read or replace it.
    """

    def __init__(
        self, max_slots: int, width: int | tuple[int, ...], dtype: torch.dtype, device: Device, fill: int | None = 0
    ) -> None:
        """New places hold `fill`; None, for lists of ids: new columns of a slot repeat its first."""
        widths = width if isinstance(width, tuple) else (width,)
        self.shape = (0, *widths)  # the host's idea of it, steps ahead
        self.tensor = torch.zeros(self.shape, dtype=dtype, device=device.torch_device)
        self._max_slots = max_slots
        self._fill = fill

    def reserve(self, slots: int, width: int | tuple[int, ...], upload: Upload) -> None:
        """Host: from this step on there are at least this many slots and columns."""
        widths = width if isinstance(width, tuple) else (width,)
        shape = (min(_grown(self.shape[0], slots), self._max_slots), *map(_grown, self.shape[1:], widths))
        if shape == self.shape:
            return
        self.shape = shape
        fill = self._fill

        def grow() -> None:
            old = self.tensor
            self.tensor = old.new_full(shape, fill or 0)
            self.tensor[tuple(slice(size) for size in old.shape)].copy_(old)
            if fill is None and old.shape[0]:
                slots, width = old.shape
                self.tensor[:slots, width:].copy_(old[:, :1].expand(-1, shape[1] - width))

        upload.then(grow)

    def remake(self, kept: np.ndarray[Any, np.dtype[np.int64]], width: int, upload: Upload) -> None:
        """Host: from this step on the slots are these, in this order, of so many columns or a little more. Slots that
        are not there yet come last."""
        known = kept[kept < self.shape[0]]
        shape = self.shape = (_power(len(kept)), _power(width))
        span, fill = upload.put(known), self._fill or 0

        def copy() -> None:
            old, num = self.tensor, min(self.tensor.shape[1], shape[1])
            self.tensor = old.new_full(shape, fill)
            self.tensor[: len(known), :num].copy_(old[:, :num].index_select(0, upload.tensor(span)))

        upload.then(copy)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _grown(size: int, wanted: int) -> int:
    if wanted <= size:
        return size
    return max(_FIRST, _power(wanted))
