"""Device memory for the few rows that use a feature: rows take slots, and a table has as many as were ever needed."""

from __future__ import annotations

import heapq

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.runner.batch.staging import Upload

_FIRST = 4  # slots and columns of a table's first size


class Slots:
    """Host: which slot a row has. The smallest free one is handed out, so tables stay small."""

    def __init__(self, num_rows: int) -> None:
        self.of_row = np.full(num_rows, -1, np.int64)
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
        self.of_row[row] = slot
        return slot

    def release(self, row: int) -> None:
        """Give the row's slot back, if it has one. Safe to hand on at once: the device runs steps in order."""
        if self.of_row[row] >= 0:
            heapq.heappush(self._free, int(self.of_row[row]))
            self.of_row[row] = -1


class SlotTable:
    """A device tensor [slots, width] that grows on the stream when the host hands out a place beyond it.

    `tensor` belongs to the stream: only closures read or replace it.
    """

    def __init__(self, max_slots: int, width: int, dtype: torch.dtype, device: Device) -> None:
        self.tensor = torch.zeros((0, width), dtype=dtype, device=device.torch_device)
        self._max_slots = max_slots
        self._shape = (0, width)  # the host's idea of it, steps ahead

    def reserve(self, slots: int, width: int, upload: Upload) -> None:
        """Host: from this step on there are at least this many slots and columns.

        New slots hold 0. New columns of a slot repeat its first, as a list of ids padded with one of its own.
        """
        shape = (min(_grown(self._shape[0], slots), self._max_slots), _grown(self._shape[1], width))
        if shape == self._shape:
            return
        self._shape = shape

        def grow() -> None:
            old = self.tensor
            self.tensor = torch.zeros(shape, dtype=old.dtype, device=old.device)
            slots, width = old.shape
            self.tensor[:slots, :width].copy_(old)
            if slots:
                self.tensor[:slots, width:].copy_(old[:, :1].expand(-1, shape[1] - width))

        upload.then(grow)


def _grown(size: int, wanted: int) -> int:
    if wanted <= size:
        return size
    return max(_FIRST, 1 << (wanted - 1).bit_length())
