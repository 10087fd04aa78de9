"""The sum of each row's tokens in plain torch."""

from __future__ import annotations

import torch


def segment_sum(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Sums [N, C] of x [T, C] over tokens starts[n] to starts[n + 1], in float32 at least; 0 of no tokens.

    `starts` [N + 1] goes up. Tokens from its last number on are nobody's. A row's tokens are added one after another,
    so its sum does not depend on what else is in the step, down to the last bit.
    """
    tokens = torch.arange(len(x), device=x.device, dtype=starts.dtype)
    rows = torch.searchsorted(starts, tokens, right=True) - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = torch.zeros(len(starts), x.shape[1], dtype=dtype, device=x.device)  # the last one is for nobody's tokens
    return sums.index_add_(0, rows, x.to(dtype))[:-1]
