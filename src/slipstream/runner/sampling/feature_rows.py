"""Device tables for features that few rows use: such a row gets a line, and a table has as many lines as needed."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.runner.batch.staging import StagedTensor, Upload, UploadSpan
from slipstream.step import Ints

_FIRST = 4  # minimum number of lines and columns of a table, unless its bound is smaller
_MAX_TABLES = 32  # tables of one kind that graphs are captured with; by doubling, a table reaches its bound before


@dataclass(frozen=True, slots=True)
class FeatureUsers:
    """The sampling rows of one step that have a line, uploaded: their indices in the step, and their lines."""

    index: UploadSpan
    lines: UploadSpan
    rows: Ints


class LineAllocator:
    """The line of each row, -1 for none. The smallest free line is assigned, so that tables stay small."""

    def __init__(self, num_rows: int) -> None:
        self.of_row = np.full(num_rows, -1, np.int64)  # host
        self._free: list[int] = []
        self._num = 0  # lines ever assigned

    def __len__(self) -> int:
        """Number of lines in use."""
        return self._num - len(self._free)

    def take(self, row: int) -> int:
        assert self.of_row[row] < 0, f"row {row} already has line {self.of_row[row]}"
        if self._free:
            line = heapq.heappop(self._free)
        else:
            line = self._num
            self._num += 1
        self._set(row, line)
        return line

    def _set(self, row: int, line: int) -> None:
        self.of_row[row] = line

    def is_used_by(self, rows: Ints) -> bool:
        """Host: whether any of these rows has a line."""
        return self._num > len(self._free) and bool((self.of_row[rows] >= 0).any())

    def users(self, rows: Ints, upload: Upload) -> FeatureUsers | None:
        """Host: the sampling rows of a step that have a line; None if none has."""
        if self._num == len(self._free):
            return None
        lines = self.of_row[rows]
        index = np.flatnonzero(lines >= 0)
        if not len(index):
            return None
        return FeatureUsers(upload.put(index), upload.put(lines[index]), rows[index])

    def release(self, row: int) -> None:
        """Free the row's line, if it has one. It can be reused at once: the device runs steps in order."""
        if self.of_row[row] >= 0:
            heapq.heappush(self._free, int(self.of_row[row]))
            self._set(row, -1)

    def close_up(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Renumber the used lines from 0 on, in their order. Returns their old numbers."""
        rows = np.flatnonzero(self.of_row >= 0)
        rows = rows[np.argsort(self.of_row[rows])]
        before = self.of_row[rows]
        for line, row in enumerate(map(int, rows)):
            self._set(row, line)
        self._free, self._num = [], len(rows)
        return before


class StagedLines(LineAllocator):
    """With a copy on the device, for captured work."""

    def __init__(self, num_rows: int, device: Device) -> None:
        super().__init__(num_rows)
        self.staged = StagedTensor((num_rows,), np.int64, device, fill=-1)

    def _set(self, row: int, line: int) -> None:
        super()._set(row, line)
        self.staged.write(row, line)

    def flush(self, upload: Upload) -> None:
        self.staged.flush(upload)


class LineTable:
    """A device tensor [lines, width] that grows when a line beyond its size is assigned.

    Only device work reads or replaces `tensor`.
    """

    def __init__(self, max_lines: int, width: int, dtype: torch.dtype, device: Device) -> None:
        self.shape = (0, width)  # after all launched steps
        self.tensor = torch.zeros(self.shape, dtype=dtype, device=device.torch_device)
        self._max_slots = max_lines

    def reserve(self, lines: int, upload: Upload) -> None:
        """Host: from this step on there are at least this many lines."""
        if lines <= self.shape[0]:
            return
        shape = self.shape = (min(max(_FIRST, _power(lines)), self._max_slots), self.shape[1])

        def grow() -> None:
            old = self.tensor
            self.tensor = old.new_zeros(shape)
            self.tensor[: len(old)].copy_(old)

        upload.then(grow)


class ListTable:
    """Lists of ids of the rows that have one: a device tensor [lines, ids] or [lines, lists, ids].

    All lines are as large as the largest. The scheduler admits only as many rows as keep the tensor within
    `max_numbers` numbers (`RowAllocator.can_share_tables`). A tensor that is too small is replaced by one for the
    present rows. Only device work reads or replaces `tensor`.
    """

    def __init__(
        self,
        lines: LineAllocator,
        num_dims: int,
        dtype: torch.dtype,
        device: Device,
        max_numbers: int,
        fill: int | None,
    ) -> None:
        """Unused numbers of a list are `fill`; None: the list's first number."""
        self.lines = lines
        self.sizes = np.zeros((len(lines.of_row), num_dims), np.int64)  # by row; 0 for rows without a list
        self.shape = (0,) * (1 + num_dims)  # after all launched steps
        self.tensor = torch.zeros(self.shape, dtype=dtype, device=device.torch_device)
        self.number = 0  # of the current roomy tensor: work captured with one must not run with another
        self.is_roomy = True  # larger than the present rows need; else any admission may need another tensor
        self._max_numbers = max_numbers
        self._fill = fill

    def take(self, row: int, *size: int) -> None:
        self.sizes[row] = size
        self.lines.take(row)

    def release(self, row: int) -> None:
        self.sizes[row] = 0
        self.lines.release(row)

    def make_room(self, upload: Upload) -> None:
        """Host, before new lists are written: from this step on there is room for all rows. Lines may be renumbered."""
        largest = (int(self.lines.of_row.max()) + 1, *map(int, self.sizes.max(0)))
        if all(wanted <= there for wanted, there in zip(largest, self.shape, strict=True)):
            return
        kept = self.lines.close_up()
        known = kept[kept < self.shape[0]]  # lines of new rows, which were beyond the tensor, come last
        exact = (len(kept), *largest[1:])
        # never smaller than before: alternating sizes would be captured again and again
        roomy = tuple(max(_FIRST, _power(size), there) for size, there in zip(exact, self.shape, strict=True))
        self.is_roomy = math.prod(roomy) <= self._max_numbers and self.number < _MAX_TABLES
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
