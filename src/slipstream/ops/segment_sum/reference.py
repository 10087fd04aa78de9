"""The sum of each row's tokens in plain torch."""

from __future__ import annotations

import torch


def segment_sum(
    x: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor | None = None,
    origins: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums [N, C] of x [T, C] over tokens starts[n] to starts[n + 1], in float32 at least; 0 of no tokens.

    `starts` [N + 1] goes up. Tokens from its last number on are nobody's. With `begins` [N] row n counts only those
    from begins[n] on, which is starts[n] at least. With `origins` [N] a token is multiplied by its position + 1, where
    origins[n] is the position of token starts[n]. A row's tokens are added one after another, so its sum does not
    depend on what else is in the step, down to the last bit.
    """
    rows = rows_of_tokens(len(x), starts, begins)
    dtype = torch.promote_types(x.dtype, torch.float32)
    x = x.to(dtype)
    if origins is not None:
        own = rows.clamp(max=len(origins) - 1)
        first = starts.index_select(0, own).to(torch.int64) - origins.index_select(0, own).to(torch.int64)
        places = torch.arange(1, len(x) + 1, device=x.device) - first  # positions + 1
        x = x * places.to(dtype).unsqueeze(1)
    sums = torch.zeros(len(starts), x.shape[1], dtype=dtype, device=x.device)  # the last one is for nobody's tokens
    return sums.index_add_(0, rows, x)[:-1]


def rows_of_tokens(
    num_tokens: int, starts: torch.Tensor, begins: torch.Tensor | None = None, first: int = 0
) -> torch.Tensor:
    """[T] the row of each token from `first` on; of tokens that count for none, the number of rows."""
    tokens = torch.arange(first, first + num_tokens, device=starts.device, dtype=starts.dtype)
    rows = torch.searchsorted(starts, tokens, right=True) - 1
    if begins is None:
        return rows
    past = len(begins)
    own = begins.to(starts.dtype).index_select(0, rows.clamp(max=past - 1))
    return torch.where(tokens < own, past, rows)
