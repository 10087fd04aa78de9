"""The best token of a row from those of its parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.sample.reference import Choice


def best_parts(tops: torch.Tensor, ids: torch.Tensor, max_parts: int) -> Choice:
    """`tops` [R, parts]: the largest score of each part, NaN if it has one; `ids` [R, parts]: its token. At most
    `max_parts` parts, for which one kernel is compiled."""
    num_rows, num_parts = tops.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=tops.device)
    failed = torch.empty(num_rows, dtype=torch.bool, device=tops.device)
    _row_kernel[(num_rows,)](
        tops,
        ids,
        tokens,
        failed.view(torch.uint8),
        num_parts,
        PARTS=triton.next_power_of_2(max_parts),
        num_warps=1,
        **dependent(tops.device, num_rows),
    )
    return Choice(tokens, failed)


# grid: (rows,)
@triton.jit(do_not_specialize=["num_parts"])
def _row_kernel(tops, ids, tokens, failed, num_parts, PARTS: tl.constexpr, DEPENDENT: tl.constexpr):
    release_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top = tl.load(tops + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    has_nan = tl.max((top != top).to(tl.int32), 0) > 0
    best, winner = tl.max(
        tl.where(top == top, top, float("-inf")), 0, return_indices=True, return_indices_tie_break_left=True
    )
    no_token = has_nan | (best == float("-inf"))
    token = tl.load(ids + row * num_parts + winner).to(tl.int64)
    tl.store(tokens + row, tl.where(no_token, 0, token))
    tl.store(failed + row, no_token.to(tl.uint8))
