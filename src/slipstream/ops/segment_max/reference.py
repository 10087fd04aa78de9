"""Segment maximum and sum in plain torch."""

from __future__ import annotations

import torch

from slipstream.ops.segment_sum.reference import rows_of_tokens


def segment_max_into(
    out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int, begins: torch.Tensor | None = None
) -> None:
    """out [N + 1, C] = maximum of out and x [T, C] over the tokens of each row, in place.

    Row n has tokens starts[n] to starts[n + 1], counted over the whole step; x holds the tokens of the step from
    `first` on. With `begins` [N], tokens of row n before begins[n] are ignored. The last row of `out` receives padding
    tokens and holds no result.
    """
    rows = rows_of_tokens(len(x), starts, begins, first)
    out.scatter_reduce_(0, rows.unsqueeze(1).expand_as(x), x.to(out.dtype), "amax")


def segment_add_into(out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int) -> None:
    """As `segment_max_into`, of sums. Tokens are added one after another, so parts and batch do not matter."""
    out.index_add_(0, rows_of_tokens(len(x), starts, None, first), x.to(out.dtype))
