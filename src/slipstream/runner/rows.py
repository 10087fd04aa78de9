"""TokenHistory: the token ids of all positions of each row, which drafts are found in.

A model with attention keeps them in the pages of one cache group: pages that a prefix hit reuses hold the tokens of the
prefix too, so no history is uploaded at admission. A model without attention has no pages: each row has its own part
of a table, and a row that continues from a checkpoint uploads the tokens before it. Ids of rejected drafts are
overwritten by the step that computes their positions again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from slipstream.contracts.cache_spec import CacheGroup
from slipstream.contracts.step import NULL_PAGE, Admission, DrawEdits, PageUpdates, StepPlan
from slipstream.device.device import Device
from slipstream.ops.elementwise import KeptTokens
from slipstream.ops.sampling import Accepted, DrawnTokens, accept_, store_drawn_
from slipstream.runner.features import Gathered, StepFeature
from slipstream.runner.staging import HostRing, StagedTensor, Upload, UploadSpan


class TokenHistory(StepFeature):
    def __init__(self, groups: Sequence[CacheGroup], page_tables: PageTables, device: Device) -> None:
        """The group is the first one that keeps every position, else the one with the largest window."""
        self.group = min(
            range(len(groups)), key=lambda number: (groups[number].window > 0, -groups[number].window), default=-1
        )
        self._page_size = page_tables.page_size
        self._device = device
        self._uploads: list[Admission] = []
        self._row_size = 0  # positions of a row, without groups
        if groups:
            self.table = page_tables.tables[self.group]  # [rows, pages per row] page numbers; 0: not kept
            self.tokens = torch.zeros(0, self._page_size, dtype=torch.int32)  # [pages, page size]
        else:
            num_rows, width = page_tables.tables.shape[1:]
            pages = torch.arange(1, 1 + num_rows * width, device=device.torch_device)
            self.table = pages.view(num_rows, width)
            self.tokens = device.cache_zeros((1 + num_rows * width, self._page_size), torch.int32)
            self._row_size = width * self._page_size

    def take_memory(self, group_pages: Sequence[int]) -> None:
        """Allocate the pages of the group in place of the current ones."""
        if self.group >= 0:
            self.tokens = self._device.cache_zeros((group_pages[self.group], self._page_size), torch.int32)

    @property
    def kept(self) -> KeptTokens:
        """Device: where a step stores its ids."""
        return KeptTokens(self.tokens, self.group, self._row_size)

    def at(self, rows: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Device: the ids [n] at a position of each row. `tables`: of all groups [groups, rows, pages per row]."""
        table, entries = tables[self.group], positions // self._page_size
        pages = table.view(-1).index_select(0, rows * table.shape[1] + entries)
        slots = pages * self._page_size + positions % self._page_size
        return self.tokens.view(-1).index_select(0, slots).long()

    def copy_pages(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Device: copy pages of a group, as those of its keys."""
        if group == self.group:
            self.tokens.index_copy_(0, target, self.tokens.index_select(0, source))

    def apply(self, plan: StepPlan) -> None:
        """Without groups: note rows that continue from a checkpoint."""
        self._uploads = [] if self.group >= 0 else [each for each in plan.admitted if each.num_cached]

    def flush(self, upload: Upload) -> None:
        for admission in self._uploads:
            assert admission.history is not None, f"row {admission.row} came without its history"
            span = upload.put(admission.history[: admission.num_cached])
            first = self._page_size + admission.row * self._row_size
            upload.then(functools.partial(self._fill, upload, span, first))

    def _fill(self, upload: Upload, span: UploadSpan, first: int) -> None:
        values = upload.tensor(span)
        self.tokens.view(-1)[first : first + len(values)].copy_(values)


# PageTables: the device's copy of the page tables, updated by the changes in each plan. The scheduler owns them.


class PageTables(StepFeature):
    def __init__(self, num_groups: int, num_rows: int, max_length: int, page_size: int, device: Device) -> None:
        self.page_size = page_size
        self.width = -(-max_length // page_size)
        shape = (num_groups, num_rows, self.width)
        self.tables = torch.full(shape, NULL_PAGE, dtype=torch.int64, device=device.torch_device)
        self._of_group = self.tables.unbind(0)
        self._updates: tuple[PageUpdates, ...] = ()

    def apply(self, plan: StepPlan) -> None:
        self._updates = plan.new_pages

    def flush(self, upload: Upload) -> None:
        for table, update in zip(self._of_group, self._updates, strict=True):
            if len(update.rows):
                entries = upload.put(update.rows.astype(np.int64) * self.width + update.entries)
                pages = upload.put(update.pages.astype(np.int64))
                upload.then(functools.partial(_write, table, upload, entries, pages))

    def width_of(self, max_length: int) -> int:
        """Number of pages of a row of this length."""
        return -(-max_length // self.page_size)


def _write(table: torch.Tensor, upload: Upload, entries: UploadSpan, pages: UploadSpan) -> None:
    table.view(-1).index_copy_(0, upload.tensor(entries), upload.tensor(pages))


# RowTable: the computed length of each row, the token it drew last and its drafts, on the device.
#
# The host knows none of these when it launches a step: the next step reads them from here.


class RowTable(StepFeature):
    def __init__(self, num_rows: int, device: Device, max_drafts: int = 0) -> None:
        """`num_rows`: with the padding row, which is the last and has no computed position."""
        self._computed = StagedTensor((num_rows,), np.int64, device)
        # [num_rows] computed positions of the row
        self.computed = self._computed.device
        # [num_rows, 1 + max_drafts] the token drawn last, then drafts; -1: no draft. Drafts of an earlier row owner may
        # remain: a wrong draft is never accepted
        self.next_tokens = torch.zeros(num_rows, 1 + max_drafts, dtype=torch.int64, device=device.torch_device)

    def apply(self, plan: StepPlan) -> None:
        for admission in plan.all_admitted:
            self._computed.write(admission.row, admission.num_cached)

    def flush(self, upload: Upload) -> None:
        self._computed.flush(upload)

    @property
    def max_drafts(self) -> int:
        return self.next_tokens.shape[1] - 1

    def advance(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Device: the rows' positions are computed up to these lengths. A drafted row has several: `accept` follows."""
        self.computed.index_copy_(0, rows, lengths)

    def draw(
        self, rows: torch.Tensor, tokens: torch.Tensor, failed: torch.Tensor, out: Accepted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Device: store the tokens that these rows drew. Returns tokens and failed, at `out` if given."""
        return store_drawn_(self.next_tokens, rows, tokens, failed, None if out is None else (out.tokens, out.failed))

    def accept(self, drawn: DrawnTokens, out: Accepted | None = None) -> Accepted:
        """Device: store the last token that each row accepts, and take back the positions of its rejected drafts."""
        return accept_(self.next_tokens, self.computed, drawn, out)


# RowState: the part of a `StepFeature` that a sampling stage has too.


class RowState(Protocol):
    """State of a row on the device, from admission to release. Both methods run on the host."""

    def apply(self, plan: StepPlan) -> None:
        """Drop the state of released rows and add that of admitted rows."""

    def flush(self, upload: Upload) -> None:
        """Queue the changes of this step."""


# Rows that sit out a step: their masks were late, so they draw nothing and compute their last position again later.
#
# The forward of the step is queued already. Before its head the row table gets back the row's length and its last token
# without drafts, and the head draws for the padding row in its place, so no stage, no drafter and no table sees the
# draw. Such steps are rare: this work is not captured.


class SittingRows(StepFeature):
    def __init__(self, rows: RowTable, num_buffers: int, device: Device, ring: HostRing) -> None:
        """`ring`: of the steps, whose uploaded rows are changed on the device."""
        self._table = rows
        self._ring = HostRing(num_buffers, 3 * 8 * len(rows.computed), device)
        self._of_steps = ring
        self._device = device

    def send(self, late: DrawEdits) -> Callable[[Gathered], Gathered] | None:
        """Host: upload the rows. The returned work takes their positions back."""
        sit_out = late.sit_out
        if sit_out is None:
            return None
        upload = self._ring.open()
        span = upload.put(np.stack([sit_out.rows, sit_out.computed, sit_out.tokens]).astype(np.int64))
        upload.send(self._device.compute)
        self._of_steps.forget()
        table = self._table

        def take_back(batch: Gathered) -> Gathered:
            rows, computed, tokens = upload.tensor(span).unbind(0)
            table.computed.index_copy_(0, rows, computed)
            table.next_tokens[:, 0].index_copy_(0, rows, tokens)
            table.next_tokens[:, 1:].index_fill_(0, rows, -1)  # no masks are made along its drafts
            return replace(batch, sitting=rows)

        return take_back


def leave_out_(rows: torch.Tensor, sitting: torch.Tensor | None, padding: int) -> None:
    """Device: put the padding row in the place of rows that sit out. `rows` [S] int64."""
    if sitting is not None:
        rows.masked_fill_((rows[:, None] == sitting).any(1), padding)
