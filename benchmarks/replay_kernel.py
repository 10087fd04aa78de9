"""The drafter of `drafts.py` on CUDA, in one launch like a real one: its time counts as that of drafts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous


def replay_drafts(
    next_tokens: torch.Tensor,  # [rows, 1 + drafts], whose drafts are written
    computed: torch.Tensor,  # [rows]
    table: torch.Tensor,  # [rows, width] pages of each row
    tokens: torch.Tensor,  # [pages, page size] int32, tokens of the rows
    rows: torch.Tensor,  # [draws]
    offsets: torch.Tensor | None,  # [draws]; None: every draw is the first of its row
    first: torch.Tensor,  # [vocabulary] place in `after` of the prompt that begins with a token
    after: torch.Tensor,  # [places, drafts] tokens that follow
    num_drafts: int,
) -> None:
    _replay_kernel[(len(rows),)](
        next_tokens,
        computed,
        table,
        tokens,
        rows,
        offsets,
        first,
        after,
        table.stride(0),
        num_drafts,
        PAGE=tokens.shape[1],
        WIDTH=next_tokens.shape[1],
        DRAFTS=triton.next_power_of_2(after.shape[1]),
        AFTER=after.shape[1],
        **dependent(rows.device, len(rows)),
        num_warps=1,
    )


# grid: (draws,); the program of a row's first draw writes all its drafts, the others return
@triton.jit(do_not_specialize=["num_drafts"], do_not_specialize_on_alignment=["rows", "offsets"])
def _replay_kernel(
    next_tokens,
    computed,
    table,
    tokens,
    rows,
    offsets,
    first,
    after,
    table_stride,
    num_drafts,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    AFTER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)
    draw = tl.program_id(0)
    is_first = True
    if offsets is not None:
        is_first = tl.load(offsets + draw) == 0
    if is_first:
        row = tl.load(rows + draw)
        token = tl.load(tokens + tl.load(table + row * table_stride) * PAGE)
        place = tl.load(first + token) + tl.load(computed + row)
        index = tl.arange(0, DRAFTS)
        draft = tl.load(after + place * AFTER + index, mask=index < num_drafts, other=-1)
        tl.store(next_tokens + row * WIDTH + 1 + index, draft, mask=index < num_drafts)
