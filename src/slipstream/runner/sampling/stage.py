"""Stage: a RowState that edits logits before a token is drawn.

A new stage is a file with a subclass, and an entry in `Sampler.stages`: docs/add-a-sampling-stage.md.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.contracts.step import Admission, Bools, Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import Penalty, RowHints, TokenMask
from slipstream.runner.rows import RowState
from slipstream.runner.staging import StagedTensor, Upload


class DrawBatch(NamedTuple):
    """The sampling rows of a step on the device, in the plan's order, then padding rows, if any. A row that sits out
    the step (its mask was late) is the padding row here: stages must not take its token as drawn."""

    rows: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64, of the token to draw; the first token after a prompt of n tokens has n
    # In a step with drafts a row occurs once for each token that it draws.
    offsets: torch.Tensor | None = None  # [S] int64, index among the row's; None: no row has drafts
    # [S, K] int64, drafts that come before the token to draw, in order, then -1; None: no row has drafts
    earlier: torch.Tensor | None = None
    # [S] int64, indices of these draws among those of the step, for `StageWork.users`; None: they are all
    draws: torch.Tensor | None = None
    hints: RowHints | None = None  # None: the step is captured, or no row uses a stage

    def at(self, index: torch.Tensor) -> DrawBatch:
        """Some of the draws."""
        offsets = None if self.offsets is None else self.offsets.index_select(0, index)
        earlier = None if self.earlier is None else self.earlier.index_select(0, index)
        return DrawBatch(
            self.rows.index_select(0, index), self.positions.index_select(0, index), offsets, earlier, index
        )


Edit = Callable[[torch.Tensor, DrawBatch], None]
"""Device: edits the logits [draws of the step, vocabulary] of these draws in place."""

Drawn = Callable[[torch.Tensor, DrawBatch, torch.Tensor | None], None]
"""Device: receives the drawn tokens [S] int64, and which of them are accepted [S] bool; None: all."""


@dataclass(slots=True)  # created in every step: a frozen one costs twice as much
class StageWork:
    """The device work of a stage. It finds the parameters of each row in tables on the device, at the rows of the
    batch, and changes nothing of rows that do not use the stage, so it serves all steps with the same key.

    It runs later, on the stream, when the host may be steps ahead: it must not read fields that `apply` changes.

    The edit that all rows have to see last is that of the draw itself: masks, penalties, temperature and limits are
    applied in this order as the draw reads the logits, so nothing is written. The logits hold them only if a later
    stage `reads` the logits, or the step reports them.
    """

    key: Hashable | None  # differs for other work, for example on a table of another size; None: cannot be captured
    edit: Edit | None = None
    drawn: Drawn | None = None  # for stages that depend on the output
    reads: bool = False  # the edit depends on the logits: it gets them as all stages before have left them
    needs_sampling_dtype: bool = False  # the edit computes with logits; otherwise they may have the model's dtype
    # Host, [S] the sampling rows that use the stage, so that an eager step applies `edit` to them only; None: to all.
    users: Bools | None = None
    mask: Callable[[DrawBatch], TokenMask] | None = None  # device: of one stage, `GrammarMask`
    penalty: Callable[[DrawBatch], Penalty] | None = None  # device: of one stage, `Penalties`
    temperatures: torch.Tensor | None = None  # [rows], of one stage: `Draw`
    limits: torch.Tensor | None = None  # [rows, limits] as `find_floor` takes them; of one stage: `Truncate`


class Stage(RowState):
    @abstractmethod
    def is_used_by(self, rows: Ints) -> bool:
        """Host: whether any of these sampling rows uses the stage. Changes nothing."""

    @abstractmethod
    def work(self, rows: Ints) -> StageWork:
        """Host: the work for these sampling rows, some of which use the stage. Called once per step, after `apply` and
        `flush`; steps with the same rows may share what it returns, unless its key is None."""


# StageRows: which rows use a sampling stage. Host only.


class StageRows:
    def __init__(self, num_rows: int, uses: Callable[[Admission], bool]) -> None:
        """`uses`: whether the row of this admission uses the stage."""
        self._uses = uses
        self._is_user = np.zeros(num_rows, np.bool_)
        self._users: set[int] = set()

    def apply(self, plan: StepPlan) -> tuple[list[int], list[Admission]]:
        """Returns the rows that no longer use the stage because they were released, and the admissions that do."""
        gone: list[int] = []
        if self._users:
            gone = [row for row in plan.released.tolist() if row in self._users]
            self._users.difference_update(gone)
            self._is_user[gone] = False
        admitted = [admission for admission in plan.admitted if self._uses(admission)]
        for admission in admitted:
            self._users.add(admission.row)
            self._is_user[admission.row] = True
        return gone, admitted

    def is_used_by(self, rows: Ints) -> bool:
        return bool(self._users) and bool(self._is_user[rows].any())


# Entries: assigns entries of a small device table to the rows that use a feature.


class Entries:
    """The entry of each row, -1 for none, on the host and on the device. The smallest free entry is assigned, so that
    tables stay small."""

    def __init__(self, num_rows: int, device: Device) -> None:
        self.of_row = np.full(num_rows, -1, np.int64)  # host
        self.staged = StagedTensor((num_rows,), np.int64, device, fill=-1)
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
        self.staged.write(row, entry)

    def flush(self, upload: Upload) -> None:
        self.staged.flush(upload)

    def of(self, batch: DrawBatch) -> torch.Tensor:
        """Device: the entries of these draws [S]."""
        return self.staged.device.index_select(0, batch.rows)

    def is_used_by(self, rows: Ints) -> bool:
        """Host: whether any of these rows has an entry."""
        return self._num > len(self._free) and bool(self.users(rows).any())

    def users(self, rows: Ints) -> Bools:
        """Host: which of these rows have an entry."""
        return self.of_row[rows] >= 0

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


# Device tables with an entry for each row that uses a feature. They grow on demand.

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
        self, num_rows: int, num_dims: int, dtype: torch.dtype, device: Device, max_elements: int, fill: int | None
    ) -> None:
        """Unused ids of a list are `fill`; None: the first id of the list."""
        self.entries = Entries(num_rows, device)
        self.sizes = np.zeros((num_rows, num_dims), np.int64)  # by row; 0 for rows without a list
        self.shape = (0,) * (1 + num_dims)  # after all launched steps
        self.tensor = torch.zeros(self.shape, dtype=dtype, device=device.torch_device)
        self.number = 0  # of the current roomy tensor: work captured with one must not run with another
        self.is_roomy = True  # larger than the present rows need; else any admission may need another tensor
        self._max_elements = max_elements
        self._fill = fill
        self._new: list[tuple[int, Ints, tuple[Ints, ...]]] = []

    def assign(self, row: int, ids: Ints, *coordinates: Ints) -> None:
        """Host: the ids of a row, and the coordinates of each; without coordinates the ids are one list."""
        self.sizes[row] = [1 + int(each.max()) for each in coordinates] if coordinates else len(ids)
        self.entries.assign(row)
        self._new.append((row, ids, coordinates))

    def free(self, row: int) -> None:
        self.sizes[row] = 0
        self.entries.free(row)

    def is_capturable(self, num_rows: int) -> bool:
        """Host: whether work that gathers an entry for each of so many rows may be captured: it must stay within the
        bound too."""
        return self.is_roomy and num_rows * math.prod(self.shape[1:]) <= self._max_elements

    def of(self, batch: DrawBatch) -> torch.Tensor:
        """Device: the lists of these draws [S, ...]; that of a row without one is arbitrary."""
        return self.tensor.index_select(0, self.entries.of(batch).clamp_(min=0))

    def flush(self, upload: Upload) -> None:
        if self._new:
            self._make_room(upload)
        self.entries.flush(upload)
        for row, ids, coordinates in self._new:
            at = np.ravel_multi_index(coordinates, self.shape[1:]).astype(np.int32) if coordinates else None
            self._write(int(self.entries.of_row[row]), upload, ids, at)
        self._new = []

    def _write(self, entry: int, upload: Upload, ids: Ints, at: Ints | None) -> None:
        num, span, at_span = len(ids), upload.put(ids), None if at is None else upload.put(at)

        def write() -> None:
            own, values = self.tensor[entry].view(-1), upload.tensor(span).to(self.tensor.dtype)
            own.fill_(self._fill) if self._fill is not None else own.copy_(values[:1].expand(len(own)))
            if at_span is None:
                own[:num].copy_(values)
            else:
                own.index_copy_(0, upload.tensor(at_span).long(), values)

        upload.then(write)

    def _make_room(self, upload: Upload) -> None:
        """Host, before new lists are written: make room for all rows from this step on. Entries may be renumbered."""
        largest = (int(self.entries.of_row.max()) + 1, *map(int, self.sizes.max(0)))
        if all(wanted <= there for wanted, there in zip(largest, self.shape, strict=True)):
            return
        kept: np.ndarray[Any, np.dtype[np.int64]] = self.entries.close_up()
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
