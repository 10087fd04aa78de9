"""The largest of each column over the tokens of each row, in plain torch."""

from __future__ import annotations

import torch

from slipstream.ops.segment_sum.reference import rows_of_tokens


def segment_max_into(
    out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int, begins: torch.Tensor | None = None
) -> None:
    """Raise out [N + 1, C] to the largest of x [T, C] over the tokens of each row.

    Row n has the tokens from starts[n] to starts[n + 1], counted over the whole step, of which x has those from `first`
    on; with `begins` [N] those from begins[n] on. Tokens that are nobody's may leave anything in the last row of `out`.
    """
    rows = rows_of_tokens(len(x), starts, begins, first)
    out.scatter_reduce_(0, rows.unsqueeze(1).expand_as(x), x.to(out.dtype), "amax")
