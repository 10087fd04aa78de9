"""Device memory for the few rows that use a feature: rows take slots, and tables have as many as are needed."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.runner.batch.staging import Span, StagedTensor, Upload
from slipstream.step import Ints

_FIRST = 4  # slots and columns that a table has at least, unless it comes to its bound
_MAX_TABLES = 32  # of one kind of list with which work is captured; doubling, one comes to its bound before that


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
    """A device tensor [slots, width] that grows on the stream when the host hands out a slot beyond it.

    `tensor` belongs to the stream: only closures read or replace it.
    """

    def __init__(self, max_slots: int, width: int, dtype: torch.dtype, device: Device) -> None:
        self.shape = (0, width)  # the host's idea of it, steps ahead
        self.tensor = torch.zeros(self.shape, dtype=dtype, device=device.torch_device)
        self._max_slots = max_slots

    def reserve(self, slots: int, upload: Upload) -> None:
        """Host: from this step on there are at least this many slots."""
        if slots <= self.shape[0]:
            return
        shape = self.shape = (min(max(_FIRST, _power(slots)), self._max_slots), self.shape[1])

        def grow() -> None:
            old = self.tensor
            self.tensor = old.new_zeros(shape)
            self.tensor[: len(old)].copy_(old)

        upload.then(grow)


class Lists:
    """Lists of ids of the few rows that have one: a device tensor [slots, ids] or [slots, lists, ids].

    All places are as large as the largest. Whoever sits down knows that this comes to no more than `most` numbers in
    all (`RowAllocator.can_list`). So the tensor is made anew when it is too small, for those who are here, and stays
    within that. `tensor` belongs to the stream: only closures read or replace it.
    """

    def __init__(
        self, slots: Slots, num_dims: int, dtype: torch.dtype, device: Device, most: int, fill: int | None
    ) -> None:
        """Places that a list leaves empty hold `fill`; None: the list's first number once more."""
        self.slots = slots
        self.sizes = np.zeros((len(slots.of_row), num_dims), np.int64)  # by row; 0 for those without a list
        self.shape = (0,) * (1 + num_dims)  # the host's idea of it, steps ahead
        self.tensor = torch.zeros(self.shape, dtype=dtype, device=device.torch_device)
        self.number = 0  # of tensors that are roomy: work that was captured with one must not run with another
        self.is_roomy = True  # not made for those alone who are here; else each newcomer may bring another
        self._most = most
        self._fill = fill

    def take(self, row: int, *size: int) -> None:
        self.sizes[row] = size
        self.slots.take(row)

    def release(self, row: int) -> None:
        self.sizes[row] = 0
        self.slots.release(row)

    def make_room(self, upload: Upload) -> None:
        """Host, before newcomers' lists are written: from this step on all who are here have room. Their slots may be
        others than before."""
        largest = (int(self.slots.of_row.max()) + 1, *map(int, self.sizes.max(0)))
        if all(wanted <= there for wanted, there in zip(largest, self.shape, strict=True)):
            return
        kept = self.slots.close_up()
        known = kept[kept < self.shape[0]]  # newcomers' slots that were beyond it come last
        exact = (len(kept), *largest[1:])
        # as large as it was besides: a size that comes and goes would be captured anew each time
        roomy = tuple(max(_FIRST, _power(size), there) for size, there in zip(exact, self.shape, strict=True))
        self.is_roomy = math.prod(roomy) <= self._most and self.number < _MAX_TABLES
        self.number += self.is_roomy
        shape = self.shape = roomy if self.is_roomy else exact
        span, fill = upload.put(known), self._fill

        def copy() -> None:
            old = self.tensor
            self.tensor = old.new_full(shape, fill or 0)
            both = tuple(slice(min(sizes)) for sizes in zip(old.shape[1:], shape[1:], strict=True))
            same = old[(slice(None), *both)].index_select(0, upload.tensor(span))
            self.tensor[(slice(len(known)), *both)].copy_(same)
            if fill is None and len(known):
                width = both[0].stop
                self.tensor[: len(known), width:].copy_(same[:, :1].expand(-1, shape[1] - width))

        upload.then(copy)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
