"""Drafts on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.drafts.reference import Accepted, DrawnTokens, MatchRule, RowHistory

_BLOCK = 256  # candidates per loop iteration
_SPLITS = 16  # programs that share the history of a row


def accept_(next_tokens: torch.Tensor, computed: torch.Tensor, drawn: DrawnTokens) -> Accepted:
    """Same arguments and result as the reference, in one launch. Draws of the padding row have offset 0."""
    num = len(drawn.rows)
    assert next_tokens.is_contiguous() and drawn.failed.dtype == torch.bool
    out = torch.empty(2, num, dtype=torch.bool, device=next_tokens.device)
    flags = out.view(torch.uint8)
    _accept_kernel[(num,)](
        next_tokens,
        computed,
        *drawn[:4],
        drawn.failed.view(torch.uint8),
        flags,
        num,
        len(computed) - 1,
        WIDTH=next_tokens.shape[1],
        DRAWS=triton.next_power_of_2(next_tokens.shape[1]),
        num_warps=1,
    )
    return Accepted(*out.unbind(0))


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
    flags,
    num,
    padding,
    WIDTH: tl.constexpr,
    DRAWS: tl.constexpr,
):
    first = tl.program_id(0)
    if tl.load(offsets + first) == 0:
        row = tl.load(rows + first)
        offset = tl.arange(0, DRAWS)
        own = first + offset
        inside = (own < num) & (offset < WIDTH)
        # the draws of the row: those whose offset counts on from its first draw
        inside = inside & (tl.load(offsets + own, mask=inside, other=-1) == offset)
        before = tl.load(tokens + own - 1, mask=inside & (offset > 0), other=0)
        draft = tl.load(next_tokens + row * WIDTH + offset, mask=inside & (offset > 0), other=0)
        equal = (offset == 0) | (before == draft)
        bad = tl.load(failed + own, mask=inside, other=1) != 0
        ends = (~equal | bad).to(tl.int32)
        so_far = tl.cumsum(ends, 0)
        kept = inside & (so_far == 0)
        count = tl.sum(kept.to(tl.int32), 0)
        tl.store(flags + own, kept.to(tl.uint8), mask=inside)
        tl.store(flags + num + own, (bad & equal & (so_far == 1) & (ends == 1)).to(tl.uint8), mask=inside)
        if (count > 0) & (row != padding):
            at = first + count - 1
            tl.store(next_tokens + row * WIDTH, tl.load(tokens + at))
            tl.store(computed + row, tl.load(positions + at))


def propose_from_history_(
    rows: torch.Tensor,
    offsets: torch.Tensor | None,
    history: RowHistory,
    num_drafts: int,
    rule: MatchRule,
    max_length: int,
) -> None:
    """Same arguments and result as the reference. The time depends on the rows' real lengths."""
    next_tokens, computed, table, tokens = history
    assert next_tokens.is_contiguous() and tokens.is_contiguous() and table.stride(1) == 1
    best = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    shared = (next_tokens, computed, table, tokens, rows, offsets, best, table.stride(0))
    sizes = dict(WIDTH=next_tokens.shape[1], PAGE=tokens.shape[1])
    _match_kernel[(len(rows), _SPLITS)](
        *shared, SHORTEST=rule.shortest, LONGEST=rule.longest, BLOCK=_BLOCK, **sizes, num_warps=4
    )
    _copy_kernel[(len(rows),)](
        *shared,
        num_drafts,
        min(rule.reach, 1e9),
        DRAFTS=triton.next_power_of_2(num_drafts),
        **sizes,
        num_warps=1,
    )


@triton.jit
def _token_at(position, mask, tokens, table, end, newest, PAGE: tl.constexpr):
    """Tokens of a row at these positions; -1 where masked or not kept."""
    page = tl.load(table + position // PAGE, mask=mask & (position < end), other=0)
    own = tl.load(tokens + page * PAGE + position % PAGE, mask=page > 0, other=-1)
    return tl.where(mask & (position == end), newest, own)


# grid: (draws, splits)
@triton.jit(do_not_specialize_on_alignment=["rows", "offsets"])
def _match_kernel(
    next_tokens,
    computed,
    table,
    tokens,
    rows,
    offsets,
    best,
    table_stride,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Writes the length of the best match * 2**32 + the position of its last token + 1; 0: no match."""
    draw = tl.program_id(0)
    proposes = True
    if offsets is not None:
        proposes = tl.load(offsets + draw) == 0
    if proposes:
        row = tl.load(rows + draw)
        end = tl.load(computed + row)
        newest = tl.load(next_tokens + row * WIDTH).to(tl.int32)
        own_table = table + row * table_stride
        found = tl.zeros([BLOCK], tl.int64)
        for first in range(tl.program_id(1) * BLOCK, end.to(tl.int32), tl.num_programs(1) * BLOCK):
            position = first + tl.arange(0, BLOCK)
            alive = position < end
            matched = tl.zeros([BLOCK], tl.int64)
            for back in range(LONGEST):
                # most candidates end with the first token
                if tl.max(alive.to(tl.int32), 0) > 0:
                    wanted = _token_at(end - back, end >= back, tokens, own_table, end, newest, PAGE)
                    inside = alive & (position >= back)
                    own = _token_at(position - back, inside, tokens, own_table, end, newest, PAGE)
                    alive = inside & (own == wanted) & (wanted >= 0)
                    matched += alive.to(tl.int64)
            score = matched * 4294967296 + position + 1
            found = tl.maximum(found, tl.where(matched >= SHORTEST, score, 0))
        top = tl.max(found, 0)
        if top > 0:
            tl.atomic_max(best + draw, top, sem="relaxed")


# grid: (draws,)
@triton.jit(do_not_specialize=["num_drafts"], do_not_specialize_on_alignment=["rows", "offsets"])
def _copy_kernel(
    next_tokens,
    computed,
    table,
    tokens,
    rows,
    offsets,
    best,
    table_stride,
    num_drafts,
    reach,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
):
    draw = tl.program_id(0)
    proposes = True
    if offsets is not None:
        proposes = tl.load(offsets + draw) == 0
    if proposes:
        row = tl.load(rows + draw)
        end = tl.load(computed + row)
        newest = tl.load(next_tokens + row * WIDTH).to(tl.int32)
        top = tl.load(best + draw)
        length = top // 4294967296
        after = top % 4294967296  # position after the match
        index = tl.arange(0, DRAFTS)
        inside = index < num_drafts
        exists = inside & (top > 0) & (index < length.to(tl.float32) * reach)
        source = after + index % tl.maximum(end - after + 1, 1)
        draft = _token_at(source, exists, tokens, table + row * table_stride, end, newest, PAGE)
        tl.store(next_tokens + row * WIDTH + 1 + index, tl.where(exists, draft, -1).to(tl.int64), mask=inside)
