"""TokenHistory: the token ids of all positions in the cache, in the pages of one cache group.

Pages that a prefix hit reuses hold the tokens of the prefix too, so no history is uploaded at admission. Ids of
rejected drafts are overwritten by the step that computes their positions again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.cache_spec import CacheGroup
from slipstream.device.device import Device


class TokenHistory:
    def __init__(self, groups: Sequence[CacheGroup], device: Device) -> None:
        """The group is the first one that keeps every position, else the one with the largest window."""
        self.group = min(range(len(groups)), key=lambda number: (groups[number].window > 0, -groups[number].window))
        self._page_size = groups[self.group].spec.page_size
        self._device = device
        self.tokens = torch.zeros(0, self._page_size, dtype=torch.int32)  # [pages, page size]

    def take_memory(self, group_pages: Sequence[int]) -> None:
        """Allocate the pages of the group in place of the current ones."""
        self.tokens = self._device.zeros((group_pages[self.group], self._page_size), torch.int32)

    def write(self, slots: Sequence[torch.Tensor], ids: torch.Tensor) -> None:
        """Device: store the ids [T] of a step. `slots`: per group [T], page * page_size + position in the page."""
        self.tokens.view(-1).index_copy_(0, slots[self.group], ids.to(torch.int32))

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
