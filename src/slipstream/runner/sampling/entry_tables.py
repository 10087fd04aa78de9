"""Device tables with an entry for each row that uses a feature (`entry_allocator.py`). They grow on demand."""

from __future__ import annotations

import math

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.runner.batch.staging import Upload
from slipstream.runner.sampling.entry_allocator import EntryAllocator

_FIRST = 4  # minimum number of entries and columns of a table, unless its bound is smaller
_MAX_TABLES = 32  # tables of one kind that graphs are captured with; by doubling, a table reaches its bound before


class EntryTable:
    """A device tensor [entries, width] that grows when an entry beyond its size is assigned.

    Only device work reads or replaces `tensor`.
    """

    def __init__(self, max_entries: int, width: int, dtype: torch.dtype, device: Device) -> None:
        self.shape = (0, width)  # after all launched steps
        self.tensor = torch.zeros(self.shape, dtype=dtype, device=device.torch_device)
        self._max_entries = max_entries

    def reserve(self, entries: int, upload: Upload) -> None:
        """Host: from this step on there are at least this many entries."""
        if entries <= self.shape[0]:
            return
        shape = self.shape = (min(max(_FIRST, _power(entries)), self._max_entries), self.shape[1])

        def grow() -> None:
            old = self.tensor
            self.tensor = old.new_zeros(shape)
            self.tensor[: len(old)].copy_(old)

        upload.then(grow)


class ListTable:
    """Lists of ids of the rows that have one: a device tensor [entries, ids] or [entries, lists, ids].

    All entries are as large as the largest. The scheduler admits only as many rows as keep the tensor within
    `max_elements` elements (`RowAllocator.can_share_tables`). A tensor that is too small is replaced by one for the
    present rows. Only device work reads or replaces `tensor`.
    """

    def __init__(
        self,
        entries: EntryAllocator,
        num_dims: int,
        dtype: torch.dtype,
        device: Device,
        max_elements: int,
        fill: int | None,
    ) -> None:
        """Unused ids of a list are `fill`; None: the first id of the list."""
        self.entries = entries
        self.sizes = np.zeros((len(entries.of_row), num_dims), np.int64)  # by row; 0 for rows without a list
        self.shape = (0,) * (1 + num_dims)  # after all launched steps
        self.tensor = torch.zeros(self.shape, dtype=dtype, device=device.torch_device)
        self.number = 0  # of the current roomy tensor: work captured with one must not run with another
        self.is_roomy = True  # larger than the present rows need; else any admission may need another tensor
        self._max_elements = max_elements
        self._fill = fill

    def assign(self, row: int, *size: int) -> None:
        self.sizes[row] = size
        self.entries.assign(row)

    def free(self, row: int) -> None:
        self.sizes[row] = 0
        self.entries.free(row)

    def make_room(self, upload: Upload) -> None:
        """Host, before new lists are written: make room for all rows from this step on. Entries may be renumbered."""
        largest = (int(self.entries.of_row.max()) + 1, *map(int, self.sizes.max(0)))
        if all(wanted <= there for wanted, there in zip(largest, self.shape, strict=True)):
            return
        kept = self.entries.close_up()
        known = kept[kept < self.shape[0]]  # entries of new rows, which were beyond the tensor, come last
        exact = (len(kept), *largest[1:])
        # never smaller than before: alternating sizes would be captured again and again
        roomy = tuple(max(_FIRST, _power(size), there) for size, there in zip(exact, self.shape, strict=True))
        self.is_roomy = math.prod(roomy) <= self._max_elements and self.number < _MAX_TABLES
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
