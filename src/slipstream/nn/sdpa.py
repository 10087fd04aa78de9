"""SdpaAttention: attention over pages with torch's scaled_dot_product_attention, on any device of torch.

Rows of one token are batched into few calls; longer rows have one call each. Shapes come from the host's counts, masks
from the device's lengths and positions; no device value is read on the host. Each cache group has its own metadata. A
group with a window gathers only the pages that the window can touch. In float32 on the CPU the C kernel, once
compiled, runs all tokens: it gathers nothing, and results do not depend on the split of a row into chunks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import InvalidOption
from slipstream.config.buffer_size import GATHERED_KEYS
from slipstream.contracts.cache_spec import CacheGroup
from slipstream.nn.context import AttentionBackend, BatchView, ForwardContext, RelativeScores
from slipstream.nn.shapes import has_only
from slipstream.ops.attention import (
    attend_chunk,
    attend_in_place,
    attend_pages,
    attend_single,
    cut_tiles,
    serves_pages,
)
from slipstream.ops.attention.bidirectional import (
    BidirectionalMetadata,
    attend_bidirectional,
    bidirectional_metadata,
)

# Fields of a cache spec that torch's attention implements.
_KNOWN = {"num_heads", "num_kv_heads", "head_dim", "dtype", "page_size", "window"}
# A call costs about as much as this many masked key positions.
CALL_COST = 256
# Tokens of a row per call in layers with a window.
WINDOW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class _Singles:
    """Adjacent rows of one token each, gathered to one width."""

    tokens: slice
    slots: torch.Tensor  # [rows * width * page_size]
    mask: torch.Tensor  # [rows, 1, 1, width * page_size]


@dataclass(frozen=True, slots=True)
class _InPlace:
    """All tokens of the step, for the kernel that reads pages in place."""

    tokens: slice
    table: torch.Tensor  # [rows, width]
    lengths: torch.Tensor  # [tokens]: visible positions per token
    tiles: torch.Tensor | None  # None: one token per row
    window: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of a row, or its last. Without slots they start at position 0 and attend to the step's keys."""

    tokens: slice
    own: slice  # without slots: the keys of the step that they attend to
    written: torch.Tensor  # [own keys]: slots of these keys, for calls without keys
    slots: torch.Tensor | None  # [width * page_size]
    mask: torch.Tensor | None  # [tokens, width * page_size]
    ends: bool  # contains the last token of the row


Part = _Singles | _InPlace | _Chunk
Parts = tuple[Part, ...]
"""In token order."""


@dataclass(frozen=True, slots=True)
class SdpaMetadata:
    groups: tuple[Parts, ...]  # per cache group
    bidirectional: BidirectionalMetadata | None  # only for models without a cache

    @property
    def is_decode(self) -> bool:
        """Whether all rows have one token and the kernel reads their pages in place."""
        if self.bidirectional is not None:
            return False
        for parts in self.groups:
            for part in parts:
                if not isinstance(part, _InPlace) or part.tiles is not None:
                    return False
        return True


class SdpaAttention(AttentionBackend):
    def __init__(self, groups: Sequence[CacheGroup], dtype: torch.dtype) -> None:
        self.groups = tuple(groups)
        # the C kernel takes float32 keys and values of one size
        known = _KNOWN | {"soft_cap", "sinks"}
        self.in_place = all(has_only(group.spec, known) and group.spec.dtype != "fp8" for group in groups)
        self.dtype = dtype  # of queries and masks, so that no layer converts masks

    def make_metadata(self, batch: BatchView, after: SdpaMetadata | None = None) -> SdpaMetadata:
        if not batch.page_tables:
            return SdpaMetadata((), bidirectional_metadata(batch.num_tokens, batch.host_seen))
        if self.in_place and serves_pages(batch.lengths, self.dtype, build=batch.num_single > 0):
            return SdpaMetadata(self._in_place_metadata(batch), None)
        if after is not None:
            return SdpaMetadata(tuple(_last_of(parts) for parts in after.groups), None)
        groups = zip(batch.page_tables, batch.slots, self.groups, strict=True)
        return SdpaMetadata(tuple(self._group_metadata(batch, *group) for group in groups), None)

    def _in_place_metadata(self, batch: BatchView) -> tuple[Parts, ...]:
        num_tokens = len(batch.num_tokens)
        lengths, tiles = batch.lengths, None
        if batch.num_single < num_tokens:
            num_tokens = int(batch.num_tokens.sum())
            lengths, tiles = batch.positions + 1, cut_tiles(batch.num_tokens)
        tokens = slice(0, num_tokens)
        groups = zip(batch.page_tables, self.groups, strict=True)
        return tuple((_InPlace(tokens, table, lengths, tiles, group.window),) for table, group in groups)

    def _group_metadata(self, batch: BatchView, table: torch.Tensor, written: torch.Tensor, group: CacheGroup) -> Parts:
        page_size, window = group.spec.page_size, group.window
        widths: NDArray[np.int32] = -(-batch.max_lengths // page_size)
        single = batch.num_single
        parts: list[Part] = []
        touched: NDArray[np.int32] = widths[:single]
        if window:
            touched = np.minimum(touched, _touched(page_size, window, 1))
        for start, stop, width in split_by_width(touched.tolist(), CALL_COST // page_size, GATHERED_KEYS // page_size):
            rows = slice(start, stop)
            last = batch.lengths[rows] - 1
            slots, mask = self._see(table[rows], written[rows], last, width, group)
            parts.append(_Singles(rows, slots.view(-1), mask.view(stop - start, 1, 1, -1)))
        start = single
        for row in range(single, len(widths)):
            num_tokens, length = int(batch.num_tokens[row]), int(batch.max_lengths[row])
            stop = start + num_tokens
            if num_tokens == length and not (window and num_tokens > window) and not reads_pages(group):
                tokens = slice(start, stop)
                parts.append(_Chunk(tokens, tokens, written[tokens], None, None, True))
            else:
                at_once = WINDOW_TOKENS if window else num_tokens
                for first in range(start, stop, at_once):
                    tokens = slice(first, min(first + at_once, stop))
                    width = int(widths[row])
                    if window:
                        width = min(width, _touched(page_size, window, tokens.stop - first))
                    positions, last = batch.positions[tokens], written[tokens][-1:]
                    slots, mask = self._see(table[row : row + 1], last, positions, width, group)
                    parts.append(_Chunk(tokens, tokens, written[tokens], slots.view(-1), mask, tokens.stop == stop))
            start = stop
        return tuple(parts)

    def _see(
        self, table: torch.Tensor, written: torch.Tensor, positions: torch.Tensor, width: int, group: CacheGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of each row that its tokens attend to, and the mask over them.

        `positions` [queries]: one per row, or any number for a single row; `written` [rows]: the slot of the last
        token of each row. Returns [rows, width * page_size] and [queries, width * page_size]: 0 for a visible key, -inf
        otherwise. Unused slots of a page may hold NaN, so masked positions use `written` as their slot.
        """
        num_rows, page_size, window = len(table), group.spec.page_size, group.window
        first, last = positions[:num_rows].unsqueeze(1), positions[-num_rows:].unsqueeze(1)
        queries = positions.unsqueeze(1)
        keys = torch.arange(width * page_size, device=positions.device)
        if not window:
            pages = table[:, :width]
            hidden, unseen = keys > queries, keys > last
        else:
            # from the page of the first visible key; indices past the table are clamped to the last page and masked
            begin = (first - (window - 1)).clamp_(min=0) // page_size
            index = begin + torch.arange(width, device=begin.device)
            pages = table.gather(1, index.clamp_(max=table.shape[1] - 1))
            keys = begin * page_size + keys
            hidden = (keys > queries).logical_or_(keys <= queries - window)
            unseen = (keys > last).logical_or_(keys <= first - window)
        slots = pages.unsqueeze(2) * page_size + torch.arange(page_size, device=pages.device)
        slots = torch.where(unseen, written.unsqueeze(1), slots.view(num_rows, -1))
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=positions.device)
        return slots, mask.masked_fill_(hidden, -torch.inf)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        site: int,
        scale: float,
        context: ForwardContext,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = context.caches[site]
        group = context.group_of_site[site]
        metadata: SdpaMetadata = context.metadata
        cap = self.groups[group].spec.soft_cap
        outs = []
        for part in metadata.groups[group]:
            mine = query[part.tokens]
            if isinstance(part, _Singles):
                out = attend_single(mine, keys, values, part.slots, part.mask, scale, cap, sinks)
            elif isinstance(part, _InPlace):
                out = attend_in_place(
                    mine, keys, values, part.table, part.lengths, part.tiles, scale, cap, part.window, sinks
                )
            elif part.slots is None or part.mask is None:
                if key is None or value is None:
                    own_keys = keys.flatten(0, 1).index_select(0, part.written)
                    own_values = values.flatten(0, 1).index_select(0, part.written)
                else:
                    own_keys, own_values = key[part.own], value[part.own]
                out = attend_chunk(mine, own_keys, own_values, scale)
            else:
                out = attend_pages(mine, keys, values, part.slots, part.mask, scale, cap, sinks)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def bidirectional(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        context: ForwardContext,
        reach: int = 0,
        bias: torch.Tensor | None = None,
        relative: RelativeScores | None = None,
    ) -> torch.Tensor:
        metadata: SdpaMetadata = context.metadata
        assert metadata.bidirectional is not None, "bidirectional attention is for models without a cache"
        of_queries, of_keys = (None, None) if relative is None else (relative.of_queries, relative.of_keys)
        return attend_bidirectional(query, key, value, scale, metadata.bidirectional, reach, bias, of_queries, of_keys)


def reads_pages(group: CacheGroup) -> bool:
    """Whether a whole prompt reads its keys from the pages: torch's attention does not implement all of the spec, or
    the cache has rounded them."""
    return not has_only(group.spec, _KNOWN) or group.spec.dtype == "fp8"


def _touched(page_size: int, window: int, num_tokens: int) -> int:
    """Upper bound of the pages that hold visible keys of this many consecutive tokens."""
    return -(-(window + num_tokens - 2) // page_size) + 1


def _last_of(parts: Parts) -> Parts:
    """The parts restricted to the last token of every row."""
    made: list[Part] = []
    for part in parts:
        if not isinstance(part, _Chunk):
            made.append(part)
        elif part.ends:
            row = made[-1].tokens.stop if made else 0
            mask = None if part.mask is None else part.mask[-1:]
            made.append(_Chunk(slice(row, row + 1), part.own, part.written, part.slots, mask, True))
    return tuple(made)


def split_by_width(widths: list[int], call_cost: int, max_pages: int) -> list[tuple[int, int, int]]:
    """Runs (start, stop, width) of adjacent rows, each gathered to the width of its widest row.

    A row joins the previous run unless that would pad more pages than a call costs, or gather more than `max_pages`.
    Greedy: exact grouping would cost the host more than it saves the device.
    """
    runs: list[tuple[int, int, int]] = []
    start = widest = total = padding = 0
    for row, width in enumerate(widths):
        wider = max(widest, width)
        joined = wider * (row + 1 - start) - (total + width)
        if row > start and (joined - padding > call_cost or wider * (row + 1 - start) > max_pages):
            runs.append((start, row, widest))
            start, widest, total, padding = row, width, width, 0
        else:
            widest, total, padding = wider, total + width, joined
    if widths:
        runs.append((start, len(widths), widest))
    return runs


# Chooses the attention backend for a model and a device.


def choose_attention(
    device: torch.device,
    groups: Sequence[CacheGroup],
    dtype: torch.dtype,
    head_dims: Sequence[int] = (),
    deterministic: bool = False,
) -> AttentionBackend:
    """Our kernels on CUDA if Triton is installed, torch's attention otherwise. `dtype` is that of queries; `head_dims`
    are those of bidirectional attention."""
    if device.type == "cuda" and any(group.spec.dtype == "fp8" for group in groups):
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise InvalidOption(
                f"kv_cache_dtype is fp8, which needs a GPU of compute capability 8.9 or more, and this one has "
                f"{capability[0]}.{capability[1]}; use auto"
            )
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from slipstream.nn.paged_attention import TritonAttention

        return TritonAttention(groups, dtype, head_dims, one_kernel=deterministic)
    if deterministic:
        raise InvalidOption("deterministic needs triton, which is not installed; run: pip install triton")
    return SdpaAttention(groups, dtype)
