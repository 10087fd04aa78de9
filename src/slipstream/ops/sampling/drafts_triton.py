"""Drafts on CUDA: one kernel stores and accepts the draws of a step, one more proposes drafts from the rows' tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.sampling.drafts import Accepted, DrawnTokens, MatchRule, RowHistory

_BLOCK = 4096  # candidates per loop iteration
_AT_ONCE = 4  # tokens that are compared before the program asks whether a candidate is left
_ROWS = 128  # draws per program, where no row has drafts


def accept_(
    next_tokens: torch.Tensor, computed: torch.Tensor, drawn: DrawnTokens, out: Accepted | None = None
) -> Accepted:
    """Same arguments and result as the reference, in one launch. Draws of the padding row have offset 0."""
    num = len(drawn.rows)
    assert next_tokens.is_contiguous() and drawn.failed.dtype == torch.bool
    if out is None:
        flags = torch.empty(2, num, dtype=torch.bool, device=next_tokens.device)
        out = Accepted(drawn.tokens, *flags.unbind(0))
    assert out.kept.dtype == out.failed.dtype == torch.bool and all(each.is_contiguous() for each in out)
    _accept_kernel[(num,)](
        next_tokens,
        computed,
        *drawn[:4],
        drawn.failed.view(torch.uint8),
        None if out.tokens is drawn.tokens else out.tokens,
        out.kept.view(torch.uint8),
        out.failed.view(torch.uint8),
        num,
        len(computed) - 1,
        WIDTH=next_tokens.shape[1],
        DRAWS=triton.next_power_of_2(next_tokens.shape[1]),
        **dependent(next_tokens.device, num),
        num_warps=1,
    )
    return out


# grid: (draws,); the program of a row's first draw handles all draws of the row, the others return
@triton.jit(
    do_not_specialize=["num", "padding"], do_not_specialize_on_alignment=["rows", "offsets", "positions", "tokens"]
)
def _accept_kernel(
    next_tokens,
    computed,
    rows,
    offsets,
    positions,
    tokens,
    failed,
    out_tokens,
    out_kept,
    out_failed,
    num,
    padding,
    WIDTH: tl.constexpr,
    DRAWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)
    first = tl.program_id(0)
    if tl.load(offsets + first) == 0:
        row = tl.load(rows + first)
        offset = tl.arange(0, DRAWS)
        own = first + offset
        inside = (own < num) & (offset < WIDTH)
        # the draws of the row: those whose offset counts on from its first draw
        inside = inside & (tl.load(offsets + own, mask=inside, other=-1) == offset)
        token = tl.load(tokens + own, mask=inside, other=0)
        position = tl.load(positions + own, mask=inside, other=0)
        before = tl.load(tokens + own - 1, mask=inside & (offset > 0), other=0)
        draft = tl.load(next_tokens + row * WIDTH + offset, mask=inside & (offset > 0), other=0)
        equal = (offset == 0) | (before == draft)
        bad = tl.load(failed + own, mask=inside, other=1) != 0
        ends = (~equal | bad).to(tl.int32)
        so_far = tl.cumsum(ends, 0)
        kept = inside & (so_far == 0)
        count = tl.sum(kept.to(tl.int32), 0)
        if out_tokens is not None:
            tl.store(out_tokens + own, token, mask=inside)
        tl.store(out_kept + own, kept.to(tl.uint8), mask=inside)
        tl.store(out_failed + own, (bad & equal & (so_far == 1) & (ends == 1)).to(tl.uint8), mask=inside)
        last = kept & (offset == count - 1) & (row != padding)
        tl.store(next_tokens + row * WIDTH + offset * 0, token, mask=last)
        tl.store(computed + row + offset * 0, position, mask=last)


def store_drawn_(
    next_tokens: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    failed: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and result as the reference, in one launch."""
    num = len(rows)
    assert next_tokens.stride(1) == 1 and failed.dtype == torch.bool
    out_tokens, out_failed = (None, None) if out is None else out
    _store_kernel[(triton.cdiv(num, _ROWS),)](
        next_tokens,
        rows,
        tokens,
        failed.view(torch.uint8),
        out_tokens,
        None if out_failed is None else out_failed.view(torch.uint8),
        num,
        next_tokens.stride(0),
        ROWS=_ROWS,
        **dependent(next_tokens.device, num),
        num_warps=1,
    )
    return (tokens, failed) if out is None else out


# grid: (blocks of draws,)
@triton.jit(do_not_specialize=["num", "stride"], do_not_specialize_on_alignment=["rows", "tokens"])
def _store_kernel(
    next_tokens,
    rows,
    tokens,
    failed,
    out_tokens,
    out_failed,
    num,
    stride,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)
    draw = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = draw < num
    row = tl.load(rows + draw, mask=inside, other=0)
    token = tl.load(tokens + draw, mask=inside, other=0)
    tl.store(next_tokens + row * stride, token, mask=inside)
    if out_tokens is not None:
        tl.store(out_tokens + draw, token, mask=inside)
        tl.store(out_failed + draw, tl.load(failed + draw, mask=inside, other=0), mask=inside)


def propose_from_history_(
    rows: torch.Tensor,
    offsets: torch.Tensor | None,
    history: RowHistory,
    num_drafts: int,
    rule: MatchRule,
    max_length: int,
    out: torch.Tensor | None = None,
) -> None:
    """Same arguments and result as the reference, in one launch. The time depends on the rows' real lengths."""
    next_tokens, _, table, tokens = history
    assert next_tokens.is_contiguous() and tokens.is_contiguous() and table.stride(1) == 1
    assert out is None or (out.is_contiguous() and out.shape == (len(rows), num_drafts))
    _propose_kernel[(len(rows),)](
        *history,
        rows,
        offsets,
        out,
        table.stride(0),
        num_drafts,
        min(rule.reach, 1e9),
        SHORTEST=rule.shortest,
        LONGEST=rule.longest,
        DRAFTS=triton.next_power_of_2(num_drafts),
        WIDTH=next_tokens.shape[1],
        PAGE=tokens.shape[1],
        BLOCK=_BLOCK,
        AT_ONCE=min(_AT_ONCE, rule.longest),
        **dependent(next_tokens.device, len(rows)),
        num_warps=16,
    )


@triton.jit
def _token_at(position, mask, tokens, table, end, newest, PAGE: tl.constexpr):
    """Tokens of a row at these positions; -1 where masked or not kept."""
    page = tl.load(table + position // PAGE, mask=mask & (position < end), other=0)
    own = tl.load(tokens + page * PAGE + position % PAGE, mask=page > 0, other=-1)
    return tl.where(mask & (position == end), newest, own)


# grid: (draws,); the program of a row's first draw searches all tokens of the row, the others return
@triton.jit(do_not_specialize=["num_drafts"], do_not_specialize_on_alignment=["rows", "offsets", "out"])
def _propose_kernel(
    next_tokens,
    computed,
    table,
    tokens,
    rows,
    offsets,
    out,
    table_stride,
    num_drafts,
    reach,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    draw = tl.program_id(0)
    row = tl.load(rows + draw)
    proposes = True
    if offsets is not None:
        proposes = tl.load(offsets + draw) == 0
    if proposes:
        end = tl.load(computed + row).to(tl.int32)  # position of the token drawn last
        newest = tl.load(next_tokens + row * WIDTH).to(tl.int32)
        own_table = table + row * table_stride
        # for each lane: length of its best match * 2**32 + the position after it; 0: no match
        best = tl.zeros([BLOCK], tl.int64)
        for first in range(0, end, BLOCK):
            position = first + tl.arange(0, BLOCK)
            exists = position < end
            alive = exists
            matched = tl.zeros([BLOCK], tl.int32)
            compared = 0
            goes_on = True
            while goes_on:
                for step in tl.static_range(AT_ONCE):
                    back = compared + step
                    wants = (end >= back) & (back < LONGEST)
                    wanted = _token_at(end - back, wants, tokens, own_table, end, newest, PAGE)
                    # not only of candidates that are left: then every load would wait for the one before
                    inside = exists & (position >= back)
                    own = _token_at(position - back, inside, tokens, own_table, end, newest, PAGE)
                    alive = alive & inside & (wanted >= 0) & (own == wanted)
                    matched += alive.to(tl.int32)
                compared += AT_ONCE
                goes_on = compared < LONGEST
                if goes_on:  # most candidates end with the first tokens
                    goes_on = tl.max(alive.to(tl.int32), 0) > 0
            score = matched.to(tl.int64) * 4294967296 + position + 1
            best = tl.maximum(best, tl.where(matched >= SHORTEST, score, 0))
        top = tl.max(best, 0)
        length = (top // 4294967296).to(tl.int32)
        after = (top % 4294967296).to(tl.int32)
        index = tl.arange(0, DRAFTS)
        asked = index < num_drafts
        found = asked & (top > 0) & (index < length.to(tl.float32) * reach)
        # where the match reaches the end of the row, the tokens between repeat
        source = after + index % tl.maximum(end - after + 1, 1)
        draft = _token_at(source, found, tokens, own_table, end, newest, PAGE)
        draft = tl.where(found, draft, -1).to(tl.int64)
        tl.store(next_tokens + row * WIDTH + 1 + index, draft, mask=asked)
        if out is not None:
            tl.store(out + draw * num_drafts + index, draft, mask=asked)
