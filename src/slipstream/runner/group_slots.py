"""GroupSlots: the slots of one group of pages in the host memory of the second cache tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from slipstream.device.device import Bytes
from slipstream.device.streams import Event


@dataclass(frozen=True, slots=True)
class GroupSlots:
    parts: tuple[torch.Tensor, ...]  # device: each [pages, width] integers; a page is its rows one after another
    page_bytes: int
    max_pages: int  # that are copied at once
    memory: Bytes  # host: [slots, page_bytes]
    file: int | None  # descriptor of the same memory, if other processes may read it
    tensor: torch.Tensor  # of the same memory
    # host, by slot: how often a page was copied to it so far, and the end of the last copy
    num_stores: list[int]
    stored: list[Event]

    def columns(self, pages: torch.Tensor) -> Iterator[torch.Tensor]:
        """The columns of each part in memory of pages [n, page_bytes] uint8: each [n, width]."""
        whole = pages.view(self.parts[0].dtype)
        start = 0
        for part in self.parts:
            yield whole[:, start : start + part.shape[1]]
            start += part.shape[1]


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last index, exclusive, of each run of consecutive slots."""
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield first, index
            first = index
