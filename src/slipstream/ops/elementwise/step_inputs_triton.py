"""Step inputs on CUDA, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.elementwise.reference import MAX_ADVANCED_DRAFTS, KeptTokens, StepInputs, StepRows

_TOKENS = MAX_ADVANCED_DRAFTS  # per program
_PAGES = 2048  # of a row per program


def gather_inputs(
    computed: torch.Tensor,
    next_tokens: torch.Tensor,
    tables: torch.Tensor,
    page_size: int,
    width: int,
    step: StepRows,
    out: StepInputs | None = None,
    kept: KeptTokens | None = None,
    *,
    advance: bool = False,
) -> StepInputs:
    """Same arguments and result as the reference."""
    rows, counts, token_rows, offsets, host_ids = step
    assert not advance or token_rows is None, "rows of several tokens advance after the step"
    if token_rows is None:
        token_rows = rows
    num_tokens, num_rows, num_groups = len(token_rows), len(rows), len(tables)
    assert next_tokens.is_contiguous()
    assert tables.is_contiguous() and width <= tables.shape[2], f"{width} pages of {tuple(tables.shape)}"
    if out is None:
        sizes = ((num_tokens,), (num_tokens,), (num_rows,), (num_groups, num_tokens), (num_groups, num_rows, width))
        out = StepInputs(*(torch.empty(size, dtype=torch.int64, device=rows.device) for size in sizes))
    assert out.slots.is_contiguous() and out.pages.is_contiguous() and out.slots.shape == (num_groups, num_tokens)
    assert len(out.ids) == num_tokens and out.pages.shape[1] == len(out.lengths) == num_rows
    if kept is not None:
        assert kept.tokens.is_contiguous() and kept.tokens.shape[1] == page_size
    num_blocks = triton.cdiv(num_tokens, _TOKENS)
    num_parts = max(1, triton.cdiv(width, _PAGES))
    _gather_kernel[(num_blocks + num_rows * num_parts,)](
        computed,
        next_tokens,
        tables,
        rows,
        counts,
        token_rows,
        offsets,
        host_ids,
        *out,
        None if kept is None else kept.tokens,
        num_tokens,
        num_rows,
        num_blocks,
        num_parts,
        width,
        tables.shape[1],
        tables.shape[2],
        out.pages.shape[2],
        0 if kept is None else kept.row_size,
        NEXT=next_tokens.shape[1],
        GROUPS=num_groups,
        KEPT=-1 if kept is None else kept.group,
        ADVANCE=advance,
        PAGE=page_size,
        TOKENS=_TOKENS,
        PAGES=_PAGES,
        num_warps=4,
    )
    return out


# grid: (blocks of tokens + rows * parts of their pages,)
@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_rows",
        "num_blocks",
        "num_parts",
        "width",
        "table_rows",
        "table_width",
        "out_width",
        "row_size",
    ],
    do_not_specialize_on_alignment=["rows", "counts", "token_rows", "offsets", "host_ids"],
)
def _gather_kernel(
    computed,
    next_tokens,
    tables,
    rows,
    counts,
    token_rows,
    offsets,
    host_ids,
    ids,
    positions,
    lengths,
    slots,
    pages,
    kept,
    num_tokens,
    num_rows,
    num_blocks,
    num_parts,
    width,
    table_rows,
    table_width,
    out_width,
    row_size,
    NEXT: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    ADVANCE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
):
    program = tl.program_id(0)
    table_size = tl.cast(table_rows, tl.int64) * table_width
    if program < num_blocks:
        token = program * TOKENS + tl.arange(0, TOKENS)
        mask = token < num_tokens
        row = tl.load(token_rows + token, mask=mask, other=0)
        position = tl.load(computed + row, mask=mask, other=0)
        if ADVANCE:  # the programs of the rows read no length then
            length = position + 1
            if counts is not None:
                length = position + tl.load(counts + token, mask=mask, other=0)
            tl.store(lengths + token, length, mask=mask)
            if offsets is not None:
                tl.debug_barrier()  # all positions of a drafted row have read its length
            tl.store(computed + row, length, mask=mask)
        if offsets is not None:
            position += tl.load(offsets + token, mask=mask, other=0)
        tl.store(positions + token, position, mask=mask)
        if host_ids is not None:
            known = tl.load(host_ids + token, mask=mask, other=0)
            mine = tl.load(next_tokens + row * NEXT + (-1 - known), mask=mask & (known < 0), other=0)
            value = tl.where(known >= 0, known, tl.maximum(mine, 0))  # a missing draft is -1
        else:
            value = tl.load(next_tokens + row * NEXT, mask=mask, other=0)
        tl.store(ids + token, value, mask=mask)
        for group in tl.static_range(GROUPS):
            cached = tl.load(tables + group * table_size + row * table_width + position // PAGE, mask=mask, other=0)
            where = slots + group * tl.cast(num_tokens, tl.int64) + token
            slot = cached * PAGE + position % PAGE
            tl.store(where, slot, mask=mask)
            if kept is not None:  # noqa: SIM102 (compile-time conditions)
                if group == KEPT:
                    tl.store(kept + slot, value.to(tl.int32), mask=mask)
        if kept is not None:  # noqa: SIM102
            if KEPT < 0:
                tl.store(kept + PAGE + row * row_size + position, value.to(tl.int32), mask=mask)
    else:
        entry = (program - num_blocks) // num_parts
        part = (program - num_blocks) % num_parts
        own = tl.load(rows + entry)
        if not ADVANCE:  # noqa: SIM102 (a compile-time condition)
            if part == 0:
                length = tl.load(computed + own)
                if counts is not None:
                    length += tl.load(counts + entry)
                else:
                    length += 1
                tl.store(lengths + entry, length)
        page = part * PAGES + tl.arange(0, PAGES)
        for group in range(GROUPS):
            source = tables + group * table_size + own * table_width
            target = pages + (tl.cast(group, tl.int64) * num_rows + entry) * out_width
            tl.store(target + page, tl.load(source + page, mask=page < width), mask=page < width)
