"""PageTables: the device's copy of the page tables, updated by the changes in each plan. The scheduler owns them."""

from __future__ import annotations

import functools

import numpy as np
import torch

from slipstream.contracts.step import NULL_PAGE, PageUpdates, StepPlan
from slipstream.device.device import Device
from slipstream.runner.batch.staging import Upload, UploadSpan


class PageTables:
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
