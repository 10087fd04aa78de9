"""SdpaAttention: attention over pages by torch's scaled dot product, on any device torch has.

Rows with one token go together in few calls, longer ones each in their own. Shapes come from the host's counts,
masks from the device's lengths and positions; no device value is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.nn.context import BatchView, ForwardContext
from slipstream.ops.cache_write import write_cache
from slipstream.ops.paged_attention import attend_chunk, attend_pages, attend_single

# One more call costs about as much as this many masked key positions.
CALL_COST = 256


@dataclass(frozen=True, slots=True)
class _Singles:
    """Neighbouring rows of one token each that are gathered to one width."""

    tokens: slice
    pages: tuple[torch.Tensor, ...]  # per group [rows * width]
    mask: torch.Tensor  # [rows, 1, 1, width * page_size]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One row of several tokens. With no pages it begins at position 0 and sees its own keys alone."""

    tokens: slice
    pages: tuple[torch.Tensor, ...] | None  # per group [width]
    mask: torch.Tensor | None  # [tokens, width * page_size]


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    parts: tuple[_Singles | _Chunk, ...]  # in the order of the tokens


class SdpaAttention:
    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        self.page_size = page_size
        self.dtype = dtype  # of queries: masks have it, so that no layer converts them

    def plan(self, batch: BatchView) -> SdpaPlan:
        widths: NDArray[np.int32] = -(-batch.max_lengths // self.page_size)
        single = batch.num_single
        parts: list[_Singles | _Chunk] = []
        for start, stop, width in split_by_width(widths[:single].tolist(), CALL_COST // self.page_size):
            pages = tuple(table[start:stop, :width].reshape(-1) for table in batch.page_tables)
            mask = self._mask(batch.lengths[start:stop] - 1, width)
            parts.append(_Singles(slice(start, stop), pages, mask.view(stop - start, 1, 1, -1)))
        start = single
        for row in range(single, len(widths)):
            num_tokens = int(batch.num_tokens[row])
            tokens = slice(start, start + num_tokens)
            start += num_tokens
            if num_tokens == batch.max_lengths[row]:
                parts.append(_Chunk(tokens, None, None))
            else:
                width = int(widths[row])
                pages = tuple(table[row, :width] for table in batch.page_tables)
                parts.append(_Chunk(tokens, pages, self._mask(batch.positions[tokens], width)))
        return SdpaPlan(tuple(parts))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        scale: float,
        context: ForwardContext,
    ) -> torch.Tensor:
        keys, values = context.caches[layer]
        group = context.group_of_layer[layer]
        write_cache(key, value, keys, values, context.batch.slots[group])
        plan: SdpaPlan = context.plan
        outs = []
        for part in plan.parts:
            mine = query[part.tokens]
            if isinstance(part, _Singles):
                out = attend_single(mine, keys, values, part.pages[group], part.mask, scale)
            elif part.pages is None or part.mask is None:
                out = attend_chunk(mine, key[part.tokens], value[part.tokens], scale)
            else:
                out = attend_pages(mine, keys, values, part.pages[group], part.mask, scale)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _mask(self, last: torch.Tensor, width: int) -> torch.Tensor:
        """[queries, width * page_size]: 0 for keys up to each query's last, minus infinity after it."""
        places = torch.arange(width * self.page_size, device=last.device)
        hidden = places > last.unsqueeze(1)
        return torch.zeros(hidden.shape, dtype=self.dtype, device=last.device).masked_fill_(hidden, -torch.inf)


def split_by_width(widths: list[int], call_cost: int) -> list[tuple[int, int, int]]:
    """Runs (start, stop, width) of neighbours, each gathered to its widest row.

    A row joins the run before it unless that would pad more pages than one more call is worth. Greedy: exact
    grouping would cost the host more than it saves the device.
    """
    runs: list[tuple[int, int, int]] = []
    start = widest = total = padding = 0
    for row, width in enumerate(widths):
        wider = max(widest, width)
        joined = wider * (row + 1 - start) - (total + width)
        if row > start and joined - padding > call_cost:
            runs.append((start, row, widest))
            start, widest, total, padding = row, width, width, 0
        else:
            widest, total, padding = wider, total + width, joined
    if widths:
        runs.append((start, len(widths), widest))
    return runs
