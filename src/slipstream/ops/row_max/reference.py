"""The largest of each column over the tokens of each row, in plain torch."""

from __future__ import annotations

import torch


def row_max_into(out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int) -> None:
    """Raise out [N + 1, C] to the largest of x [T, C] over the tokens of each row.

    Row n has the tokens from starts[n] to starts[n + 1], counted over the whole step, of which x has those from `first`
    on. Tokens that are nobody's may leave anything in the last row of `out`.
    """
    tokens = torch.arange(first, first + len(x), device=x.device, dtype=starts.dtype)
    rows = torch.searchsorted(starts, tokens, right=True) - 1
    out.scatter_reduce_(0, rows.unsqueeze(1).expand_as(x), x.to(out.dtype), "amax")
