"""Bidirectional attention with torch's scaled_dot_product_attention.

There is no padding: adjacent rows of equal length share a call, other rows have their own. In layers with a window a
long row is split along its queries, and each part gets the keys within reach.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

WINDOW_TOKENS = 256  # queries per call in layers with a window


@dataclass(frozen=True, slots=True)
class BidirectionalMetadata:
    # (first token, rows, tokens per row, tokens of a row that are attended to), in token order
    runs: tuple[tuple[int, int, int, int], ...]
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # filled on first use


def bidirectional_metadata(
    counts: NDArray[np.int32], num_seen: NDArray[np.int32] | None = None
) -> BidirectionalMetadata:
    """counts: tokens per row; num_seen: how many of them, from the first on, are attended to (None: all)."""
    runs: list[tuple[int, int, int, int]] = []
    start = 0
    if num_seen is None:
        num_seen = counts
    for length, seen in zip(counts.tolist(), num_seen.tolist(), strict=True):
        if runs and runs[-1][2:] == (length, seen):
            first, rows, *_ = runs[-1]
            runs[-1] = (first, rows + 1, length, seen)
        elif length:
            runs.append((start, 1, length, seen))
        start += length
    return BidirectionalMetadata(tuple(runs))


def attend_bidirectional(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    metadata: BidirectionalMetadata,
    reach: int,
    bias: torch.Tensor | None,
    of_queries: torch.Tensor | None = None,
    of_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `AttentionBackend.bidirectional`; the last two arguments are the fields of `RelativeScores`."""
    assert of_queries is None or not reach, "relative scores need a layer without a window"
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for first, rows, length, seen in metadata.runs:
        tokens = slice(first, first + rows * length)
        queries, keys, values = (x[tokens].unflatten(0, (rows, length)).transpose(1, 2) for x in (query, key, value))
        keys, values = keys[:, :, :seen], values[:, :, :seen]
        mine = out[tokens].unflatten(0, (rows, length)).transpose(1, 2)
        if not reach or reach >= length - 1:
            mask = None if bias is None else _bias_mask(metadata, bias, length)[..., :seen]
            if of_queries is not None:
                own = None if of_keys is None else of_keys[tokens]
                added = _relative_mask(metadata, of_queries[tokens], own, rows, length, seen).mul_(scale)
                mask = added if mask is None else added.add_(mask)
            mine.copy_(_attend(queries, keys, values, scale, mask))
            continue
        for begin in range(0, length, WINDOW_TOKENS):
            end = min(begin + WINDOW_TOKENS, length)
            low, high = max(min(begin - reach, seen - 1), 0), min(end + reach, seen)
            mask = _window_mask(metadata, begin - low, end - begin, high - low, reach, query)
            if bias is not None:
                mask = mask + _bias_mask(metadata, bias, length)[:, begin:end, low:high]
            mine[:, :, begin:end] = _attend(
                queries[:, :, begin:end], keys[:, :, low:high], values[:, :, low:high], scale, mask
            )
    return out


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _window_mask(
    metadata: BidirectionalMetadata, before: int, queries: int, keys: int, reach: int, like: torch.Tensor
) -> torch.Tensor:
    """[queries, keys]: 0 within reach, -inf beyond. The first query is at key index `before`."""
    name = (before, queries, keys, reach)
    if name not in metadata.masks:
        positions = torch.arange(keys, device=like.device)
        distance = positions - (torch.arange(queries, device=like.device) + before).unsqueeze(1)
        mask = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
        metadata.masks[name] = mask.masked_fill_(distance.abs() > reach, -torch.inf)
    return metadata.masks[name]


def _bias_mask(metadata: BidirectionalMetadata, bias: torch.Tensor, length: int) -> torch.Tensor:
    """[heads, length, length] from the bias per distance, which all layers share."""
    name = (length,)
    if name not in metadata.masks:
        middle = bias.shape[1] // 2
        mine = bias[:, middle - length + 1 : middle + length]
        metadata.masks[name] = mine.unfold(1, length, 1).flip(1)  # the next token's row is shifted left by one
    return metadata.masks[name]


def _relative_mask(
    metadata: BidirectionalMetadata,
    of_queries: torch.Tensor,
    of_keys: torch.Tensor | None,
    rows: int,
    length: int,
    seen: int,
) -> torch.Tensor:
    """[rows, heads, length, seen]: the relative-position terms of the scores, for rows of equal length."""
    name = (length, seen)
    if name not in metadata.masks:
        middle = of_queries.shape[2] // 2
        positions = torch.arange(length, device=of_queries.device)
        metadata.masks[name] = positions[:seen] - positions.unsqueeze(1) + middle  # [queries, keys] columns
    columns = metadata.masks[name]
    shape = rows, of_queries.shape[1], length, seen
    relative = of_queries.unflatten(0, (rows, length)).transpose(1, 2)
    added = relative.gather(3, columns.expand(shape))
    if of_keys is not None:
        relative = of_keys.unflatten(0, (rows, length)).transpose(1, 2)[:, :, :seen]
        own = columns.t().expand(rows, shape[1], seen, length)
        added += relative.gather(3, own).transpose(2, 3)
    return added
