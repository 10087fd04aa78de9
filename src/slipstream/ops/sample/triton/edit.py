"""In-place edits of logits: penalties, bias rows, forbidden tokens, floors. `mask.py` has masks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.sample.triton.penalty import IN_OUTPUT, penalized

_BLOCK = 2048


def penalize_(
    logits: torch.Tensor,  # [R, V]
    index: torch.Tensor | None,  # [N] int64; None: all rows in order
    counts: torch.Tensor,  # [entries, V] int32
    seen: torch.Tensor,  # [entries, V] uint8
    entries: torch.Tensor,  # [N] int64
    values: torch.Tensor,  # [N, 3]
    earlier: torch.Tensor | None = None,  # [N, K] int64
) -> None:
    """As the reference. An item with a negative entry changes nothing."""
    assert logits.stride(1) == 1 and values.is_contiguous()
    assert counts.is_contiguous() and seen.is_contiguous() and counts.shape[1] == seen.shape[1] == logits.shape[1]
    size = logits.shape[1]
    _penalize_kernel[(triton.cdiv(size, _BLOCK), len(entries))](
        logits,
        index,
        counts,
        seen,
        entries,
        values,
        earlier,
        logits.stride(0),
        size,
        EARLIER=0 if earlier is None else earlier.shape[1],
        BLOCK=_BLOCK,
    )


# grid: (blocks, items)
@triton.jit(do_not_specialize_on_alignment=["index", "entries"])
def _penalize_kernel(
    logits,
    index,
    counts,
    seen,
    entries,
    values,
    earlier,
    stride,
    size,
    EARLIER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(1).to(tl.int64)
    entry = tl.load(entries + item).to(tl.int64)
    if entry >= 0:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = token < size
        row = item
        if index is not None:
            row = tl.load(index + item).to(tl.int64)
        where = logits + row * stride + token
        x = tl.load(where, mask=mask, other=0.0).to(tl.float32)
        if earlier is not None:
            earlier += item * EARLIER
        x = penalized(x, token, mask, counts + entry * size, seen + entry * size, values + item * 3, earlier, EARLIER)
        tl.store(where, x.to(logits.dtype.element_ty), mask=mask)


def count_(counts: torch.Tensor, seen: torch.Tensor, entries: torch.Tensor, tokens: torch.Tensor) -> None:
    """As the reference. Items may have equal entries, and equal tokens."""
    assert counts.is_contiguous() and counts.dtype == torch.int32 and seen.shape == counts.shape
    assert seen.is_contiguous() and seen.dtype == torch.uint8
    num = len(entries)
    _count_kernel[(triton.cdiv(num, 128),)](counts, seen, entries, tokens, num, counts.shape[1], BLOCK=128, num_warps=4)


# grid: (blocks of items,)
@triton.jit(do_not_specialize=["num"])
def _count_kernel(counts, seen, entries, tokens, num, size, BLOCK: tl.constexpr):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(entries + item, mask=item < num, other=-1).to(tl.int64)
    token = tl.load(tokens + item, mask=item < num, other=0).to(tl.int64)
    at = entry * size + token
    tl.atomic_add(counts + at, 1, mask=entry >= 0, sem="relaxed")
    tl.store(seen + at, tl.load(seen + at, mask=entry >= 0, other=0) | IN_OUTPUT, mask=entry >= 0)


def add_entries_(logits: torch.Tensor, table: torch.Tensor, entries: torch.Tensor) -> None:
    assert logits.stride(1) == 1 and table.is_contiguous() and table.shape[1] == logits.shape[1]
    size = logits.shape[1]
    _add_kernel[(triton.cdiv(size, _BLOCK), len(entries))](logits, table, entries, logits.stride(0), size, BLOCK=_BLOCK)


# grid: (blocks, rows)
@triton.jit
def _add_kernel(logits, table, entries, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    entry = tl.load(entries + row).to(tl.int64)
    if entry >= 0:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = token < size
        where = logits + row * stride + token
        x = tl.load(where, mask=mask).to(tl.float32) + tl.load(table + entry * size + token, mask=mask).to(tl.float32)
        tl.store(where, x.to(logits.dtype.element_ty), mask=mask)


def forbid_(logits: torch.Tensor, index: torch.Tensor | None, ids: torch.Tensor, active: torch.Tensor) -> None:
    """Sets logits[index[i], ids[i, j]] to -inf where active[i]."""
    _forbid(logits, index, ids, active[:, None].expand(ids.shape))


def forbid_matched_(logits: torch.Tensor, index: torch.Tensor, ids: torch.Tensor, matched: torch.Tensor) -> None:
    """Sets logits[index[i], ids[i, j]] to -inf where matched[i, j]."""
    _forbid(logits, index, ids, matched)


def _forbid(logits: torch.Tensor, index: torch.Tensor | None, ids: torch.Tensor, where: torch.Tensor) -> None:
    assert logits.stride(1) == 1 and where.shape == ids.shape
    num, width = ids.shape
    if num and width:
        _forbid_kernel[(num,)](
            logits,
            index,
            ids,
            where.view(torch.uint8),
            logits.stride(0),
            logits.shape[1],
            width,
            ids.stride(0),
            ids.stride(1),
            where.stride(0),
            where.stride(1),
            BLOCK=64,
            num_warps=1,
        )


# grid: (items,)
@triton.jit(
    do_not_specialize=["width", "ids_item", "ids_column", "where_item", "where_column"],
    do_not_specialize_on_alignment=["index", "ids", "where"],
)
def _forbid_kernel(
    logits,
    index,
    ids,
    where,
    stride,
    size,
    width,
    ids_item,
    ids_column,
    where_item,
    where_column,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    row = item
    if index is not None:
        row = tl.load(index + item).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        token = tl.load(ids + item * ids_item + column * ids_column, mask=inside, other=-1).to(tl.int64)
        out = tl.load(where + item * where_item + column * where_column, mask=inside, other=0) != 0
        tl.store(logits + row * stride + token, float("-inf"), mask=inside & out & (token >= 0) & (token < size))


def drop_below_(logits: torch.Tensor, floor: torch.Tensor) -> None:
    """Sets logits below their row's floor to -inf."""
    assert logits.stride(1) == 1
    num_rows, size = logits.shape
    _drop_kernel[(triton.cdiv(size, _BLOCK), num_rows)](logits, floor, logits.stride(0), size, BLOCK=_BLOCK)


# grid: (blocks, rows)
@triton.jit
def _drop_kernel(logits, floor, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    lowest = tl.load(floor + row).to(tl.float32)
    if lowest > float("-inf"):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        where = logits + row * stride + token
        x = tl.load(where, mask=token < size, other=float("inf")).to(tl.float32)
        tl.store(where, float("-inf"), mask=x < lowest)
