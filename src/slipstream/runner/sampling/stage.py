"""Stage: a RowState that edits logits before a token is drawn.

A new stage is a file with a subclass, and an entry in `Sampler.stages`: docs/add-a-sampling-stage.md.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from slipstream.contracts.step import Admission, Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import Penalty, TokenMask, mask_bits_
from slipstream.runner.rows import RowState
from slipstream.runner.staging import StagedTensor, Upload, UploadSpan


@dataclass(frozen=True, slots=True)
class DrawBatch:
    """The sampling rows of a step on the device, in the plan's order, then padding rows, if any. A row that sits out
    the step (its mask was late) is the padding row here: stages must not take its token as drawn."""

    rows: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64, of the token to draw; the first token after a prompt of n tokens has n
    # In a step with drafts a row occurs once for each token that it draws.
    offsets: torch.Tensor | None = None  # [S] int64, index among the row's; None: no row has drafts
    # [S, K] int64, drafts that come before the token to draw, in order, then -1; None: no row has drafts
    earlier: torch.Tensor | None = None


Edit = Callable[[torch.Tensor, DrawBatch], None]
"""Device: edits the logits [S, vocabulary] in place."""

Drawn = Callable[[torch.Tensor, DrawBatch, torch.Tensor | None], None]
"""Device: receives the drawn tokens [S] int64, and which of them are accepted [S] bool; None: all."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """The device work of a stage in one step.

    It runs later, on the stream, when the host may be steps ahead: it must not read fields that `apply` changes.
    """

    edit: Edit | None
    drawn: Drawn | None = None  # for stages that depend on the output


PenaltyOf = Callable[[DrawBatch], Penalty]
"""Device: the penalties of the sampling rows."""

MaskOf = Callable[[DrawBatch], TokenMask]
"""Device: the tokens that the draws may choose."""


@dataclass(frozen=True, slots=True)
class ByRow:
    """Work that is the same from step to step: it reads each row's parameters from tables on the device, and does not
    change rows that do not use the stage. So it can be captured, and replayed for any rows under the same key.

    Masks, penalties, temperature and limits are not edits of the logits here: the captured draw applies them in this
    order as it reads the logits, so no edited copy is written. `work.edit` therefore sees logits before all four.
    """

    key: Hashable | None  # differs for other work, for example on a table of another size; None: adds no work
    work: StageWork = StageWork(None)
    needs_sampling_dtype: bool = False  # `work.edit` computes with logits; otherwise they may have the model's dtype
    mask: MaskOf | None = None  # of one stage: `GrammarMask`
    penalty: PenaltyOf | None = None
    limits: torch.Tensor | None = None  # [rows, 3] as `find_floor` takes them; of one stage: `Truncate`

    def with_masked_logits(self) -> ByRow:
        """The same with a mask that edits the logits."""
        mask_of = self.mask
        if mask_of is None:
            return self

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            own = mask_of(batch)
            mask_bits_(logits, own.bits, own.entries.index_select(0, own.index))

        return replace(self, work=replace(self.work, edit=edit), mask=None)


class Stage(RowState):
    @abstractmethod
    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        """Host: the work for these sampling rows; None if none of them uses the stage.

        Called once per step with all sampling rows, after `apply` and `flush`, unless `by_row` is called instead.
        """

    @abstractmethod
    def is_used_by(self, rows: Ints) -> bool:
        """Host: whether any of these sampling rows uses the stage. Changes nothing."""

    def can_capture(self, rows: Ints) -> bool:
        """Host: whether `by_row` can do the work for these sampling rows, some of which use the stage. If not, the step
        runs its head eagerly. Changes nothing."""
        return False

    def by_row(self, rows: Ints) -> ByRow:
        """Host: the work for these sampling rows, as work that can be captured. Called in place of `prepare`, if
        `can_capture` of all stages that these rows use is true."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")


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


# EntryAllocator: assigns entries of a small device table to the rows that use a feature.


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


# Device tables with an entry for each row that uses a feature (EntryAllocator). They grow on demand.

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
