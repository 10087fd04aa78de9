"""Segment sum in plain torch."""

from __future__ import annotations

import torch


def segment_sum(
    x: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor | None = None,
    origins: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums [N, C] of x [T, C] over tokens starts[n] to starts[n + 1], in float32 or wider; 0 for a row without tokens.

    `starts` [N + 1] is ascending; tokens from starts[N] on are padding. With `begins` [N], tokens of row n before
    begins[n] >= starts[n] are ignored. With `origins` [N], a token is multiplied by its position + 1, where origins[n]
    is the position of token starts[n]. A row's tokens are added in order, so the bits of its sum do not depend on the
    batch.
    """
    rows = rows_of_tokens(len(x), starts, begins)
    dtype = torch.promote_types(x.dtype, torch.float32)
    x = x.to(dtype)
    if origins is not None:
        own = rows.clamp(max=len(origins) - 1)
        first = starts.index_select(0, own).to(torch.int64) - origins.index_select(0, own).to(torch.int64)
        ordinals = torch.arange(1, len(x) + 1, device=x.device) - first  # positions + 1
        x = x * ordinals.to(dtype).unsqueeze(1)
    sums = torch.zeros(len(starts), x.shape[1], dtype=dtype, device=x.device)  # the last row is for padding
    return sums.index_add_(0, rows, x)[:-1]


def rows_of_tokens(
    num_tokens: int, starts: torch.Tensor, begins: torch.Tensor | None = None, first: int = 0
) -> torch.Tensor:
    """[T] row of each token from `first` on; the number of rows for padding and ignored tokens."""
    tokens = torch.arange(first, first + num_tokens, device=starts.device, dtype=starts.dtype)
    rows = torch.searchsorted(starts, tokens, right=True) - 1
    if begins is None:
        return rows
    past = len(begins)
    own = begins.to(starts.dtype).index_select(0, rows.clamp(max=past - 1))
    return torch.where(tokens < own, past, rows)
