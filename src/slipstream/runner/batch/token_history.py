"""TokenHistory: the token ids of all positions of each row, which drafts are found in.

A model with attention keeps them in the pages of one cache group: pages that a prefix hit reuses hold the tokens of the
prefix too, so no history is uploaded at admission. A model without attention has no pages: each row has its own part
of a table, and a row that continues from a checkpoint uploads the tokens before it. Ids of rejected drafts are
overwritten by the step that computes their positions again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from slipstream.contracts.cache_spec import CacheGroup
from slipstream.contracts.step import Admission, StepPlan
from slipstream.device.device import Device
from slipstream.ops.step_inputs import KeptTokens
from slipstream.runner.batch.page_tables import PageTables
from slipstream.runner.batch.staging import Upload, UploadSpan


class TokenHistory:
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
