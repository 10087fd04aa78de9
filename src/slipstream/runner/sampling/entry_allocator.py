"""EntryAllocator: assigns entries of a small device table to the rows that use a feature."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.contracts.step import Ints
from slipstream.device.device import Device
from slipstream.runner.batch.staging import StagedTensor, Upload, UploadSpan


@dataclass(frozen=True, slots=True)
class FeatureUsers:
    """The sampling rows of one step that have an entry, uploaded: their indices in the step, and their entries."""

    index: UploadSpan
    entries: UploadSpan
    rows: Ints


class EntryAllocator:
    """The entry of each row, -1 for none. The smallest free entry is assigned, so that tables stay small."""

    def __init__(self, num_rows: int) -> None:
        self.of_row = np.full(num_rows, -1, np.int64)  # host
        self._free: list[int] = []
        self._num = 0  # entries ever assigned

    def __len__(self) -> int:
        """Number of entries in use."""
        return self._num - len(self._free)

    def assign(self, row: int) -> int:
        assert self.of_row[row] < 0, f"row {row} already has entry {self.of_row[row]}"
        if self._free:
            entry = heapq.heappop(self._free)
        else:
            entry = self._num
            self._num += 1
        self._set(row, entry)
        return entry

    def _set(self, row: int, entry: int) -> None:
        self.of_row[row] = entry

    def is_used_by(self, rows: Ints) -> bool:
        """Host: whether any of these rows has an entry."""
        return self._num > len(self._free) and bool((self.of_row[rows] >= 0).any())

    def users(self, rows: Ints, upload: Upload) -> FeatureUsers | None:
        """Host: the sampling rows of a step that have an entry; None if none has."""
        if self._num == len(self._free):
            return None
        entries = self.of_row[rows]
        index = np.flatnonzero(entries >= 0)
        if not len(index):
            return None
        return FeatureUsers(upload.put(index), upload.put(entries[index]), rows[index])

    def free(self, row: int) -> None:
        """Free the row's entry, if it has one. It can be reused at once: the device runs steps in order."""
        if self.of_row[row] >= 0:
            heapq.heappush(self._free, int(self.of_row[row]))
            self._set(row, -1)

    def close_up(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Renumber the used entries from 0 on, in their order. Returns their old numbers."""
        rows = np.flatnonzero(self.of_row >= 0)
        rows = rows[np.argsort(self.of_row[rows])]
        before = self.of_row[rows]
        for entry, row in enumerate(map(int, rows)):
            self._set(row, entry)
        self._free, self._num = [], len(rows)
        return before


class StagedEntries(EntryAllocator):
    """With a copy on the device, for captured work."""

    def __init__(self, num_rows: int, device: Device) -> None:
        super().__init__(num_rows)
        self.staged = StagedTensor((num_rows,), np.int64, device, fill=-1)

    def _set(self, row: int, entry: int) -> None:
        super()._set(row, entry)
        self.staged.write(row, entry)

    def flush(self, upload: Upload) -> None:
        self.staged.flush(upload)
