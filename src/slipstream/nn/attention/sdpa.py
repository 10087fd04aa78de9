"""SdpaAttention: attention over pages by torch's scaled dot product, on any device torch has.

Rows with one token go together in few calls, longer ones each in their own. Shapes come from the host's counts,
masks from the device's lengths and positions; no device value is read on the host. Layers with a window have a plan
of their own, which gathers no more pages than the window can touch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.config.memory import GATHERED_KEYS
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.ops.paged_attention import attend_chunk, attend_decode, attend_pages, attend_single, serves_decode
from slipstream.ops.whole_attention.reference import WholePlan, attend_whole, plan_whole

# One more call costs about as much as this many masked key positions.
CALL_COST = 256
# Tokens of a row that go together where each sees another window.
WINDOW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class _Singles:
    """Neighbouring rows of one token each that are gathered to one width."""

    tokens: slice
    pages: torch.Tensor  # [rows * width]
    mask: torch.Tensor  # [rows, 1, 1, width * page_size]


@dataclass(frozen=True, slots=True)
class _Decode:
    """All rows of one token each, where a kernel reads their pages in place."""

    tokens: slice
    table: torch.Tensor  # [rows, width]
    lengths: torch.Tensor  # [rows]
    window: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one row. With no pages they begin at position 0 and see their own keys alone."""

    tokens: slice
    pages: torch.Tensor | None  # [width]
    mask: torch.Tensor | None  # [tokens, width * page_size]


Part = _Singles | _Decode | _Chunk
Parts = tuple[Part, ...]
"""In the order of the tokens."""


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    groups: tuple[Parts, ...]  # per cache group
    whole: WholePlan | None  # of a model without any

    @property
    def is_decode(self) -> bool:
        """Whether a kernel reads the pages of all rows in place: each has one token."""
        single = all(len(parts) == 1 and isinstance(parts[0], _Decode) for parts in self.groups)
        return self.whole is None and single


class SdpaAttention:
    def __init__(
        self, page_size: int, dtype: torch.dtype, windows: tuple[int, ...] = (0,), score_cap: float = 0.0
    ) -> None:
        """`windows`: per cache group, how many keys a token sees, itself among them; 0 means all. Scores are bounded
        to `score_cap` by tanh unless it is 0."""
        self.page_size = page_size
        self.dtype = dtype  # of queries: masks have it, so that no layer converts them
        self.windows = windows
        self.score_cap = score_cap

    def plan(self, batch: BatchView) -> SdpaPlan:
        if not batch.page_tables:
            return SdpaPlan((), plan_whole(batch.num_tokens, batch.host_seen))
        groups = zip(batch.page_tables, self.windows, strict=True)
        return SdpaPlan(tuple(self._plan_group(batch, table, window) for table, window in groups), None)

    def _plan_group(self, batch: BatchView, table: torch.Tensor, window: int) -> Parts:
        widths: NDArray[np.int32] = -(-batch.max_lengths // self.page_size)
        single = batch.num_single
        parts: list[Part] = []
        grouped = single  # rows of one token that are gathered
        if single and serves_decode(batch.lengths, self.dtype):
            parts.append(_Decode(slice(0, single), table[:single], batch.lengths[:single], window))
            grouped = 0
        touched: NDArray[np.int32] = widths[:grouped]
        if window:
            touched = np.minimum(touched, self._touched(window, 1))
        for start, stop, width in split_by_width(
            touched.tolist(), CALL_COST // self.page_size, GATHERED_KEYS // self.page_size
        ):
            last = batch.lengths[start:stop] - 1
            pages, mask = self._see(table[start:stop], last, last, width, window)
            parts.append(_Singles(slice(start, stop), pages.reshape(-1), mask.view(stop - start, 1, 1, -1)))
        start = single
        for row in range(single, len(widths)):
            num_tokens, length = int(batch.num_tokens[row]), int(batch.max_lengths[row])
            stop = start + num_tokens
            if num_tokens == length and not (window and num_tokens > window) and not self.score_cap:
                parts.append(_Chunk(slice(start, stop), None, None))
            else:
                at_once = WINDOW_TOKENS if window else num_tokens
                for first in range(start, stop, at_once):
                    tokens = slice(first, min(first + at_once, stop))
                    width = int(widths[row])
                    if window:
                        width = min(width, self._touched(window, tokens.stop - first))
                    positions = batch.positions[tokens]
                    pages, mask = self._see(table[row : row + 1], positions[:1], positions, width, window)
                    parts.append(_Chunk(tokens, pages.reshape(-1), mask))
            start = stop
        return tuple(parts)

    def _touched(self, window: int, num_tokens: int) -> int:
        """Pages that this many tokens in a row may see keys in."""
        return -(-(window + num_tokens - 2) // self.page_size) + 1

    def _see(
        self, table: torch.Tensor, first: torch.Tensor, positions: torch.Tensor, width: int, window: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of each row that its tokens see, and the mask over them.

        `first` [rows] are the rows' first positions, `positions` [queries] those of all their tokens: as many as rows,
        or any number of a single one. Returns [rows, width] and [queries, width * page_size]: 0 for a key that is seen,
        minus infinity otherwise.
        """
        places = torch.arange(width * self.page_size, device=positions.device)
        queries = positions.unsqueeze(1)
        if not window:
            hidden = places > queries
            pages = table[:, :width]
        else:
            # the page of the first key seen; past the table's end the last page stands in, wholly masked
            begin = (first - (window - 1)).clamp_(min=0) // self.page_size
            index = begin.unsqueeze(1) + torch.arange(width, device=begin.device)
            pages = table.gather(1, index.clamp_(max=table.shape[1] - 1))
            keys = begin.unsqueeze(1) * self.page_size + places
            hidden = (keys > queries).logical_or_(keys <= queries - window)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=positions.device)
        return pages, mask.masked_fill_(hidden, -torch.inf)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor,
        layer: int,
        scale: float,
        context: ForwardContext,
    ) -> torch.Tensor:
        keys, values = context.caches[layer]
        group = context.group_of_layer[layer]
        plan: SdpaPlan = context.plan
        cap = self.score_cap
        outs = []
        for part in plan.groups[group]:
            mine = query[part.tokens]
            if isinstance(part, _Singles):
                out = attend_single(mine, keys, values, part.pages, part.mask, scale, cap)
            elif isinstance(part, _Decode):
                out = attend_decode(mine, keys, values, part.table, part.lengths, scale, cap, part.window)
            elif part.pages is None or part.mask is None:
                assert key is not None, "chunks that see their own keys alone are given them"
                out = attend_chunk(mine, key[part.tokens], value[part.tokens], scale)
            else:
                out = attend_pages(mine, keys, values, part.pages, part.mask, scale, cap)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def whole(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        context: ForwardContext,
        reach: int = 0,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan: SdpaPlan = context.plan
        assert plan.whole is not None, "whole rows are for models that keep nothing in a cache"
        return attend_whole(query, key, value, scale, plan.whole, reach, bias)


def split_by_width(widths: list[int], call_cost: int, most: int) -> list[tuple[int, int, int]]:
    """Runs (start, stop, width) of neighbours, each gathered to its widest row.

    A row joins the run before it unless that would pad more pages than one more call is worth, or gather more than
    `most`. Greedy: exact grouping would cost the host more than it saves the device.
    """
    runs: list[tuple[int, int, int]] = []
    start = widest = total = padding = 0
    for row, width in enumerate(widths):
        wider = max(widest, width)
        joined = wider * (row + 1 - start) - (total + width)
        if row > start and (joined - padding > call_cost or wider * (row + 1 - start) > most):
            runs.append((start, row, widest))
            start, widest, total, padding = row, width, width, 0
        else:
            widest, total, padding = wider, total + width, joined
    if widths:
        runs.append((start, len(widths), widest))
    return runs
