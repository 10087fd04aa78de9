"""In-place edits of logits: penalties, bias rows, forbidden tokens, floors, masks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.sampling import reference

_BLOCK = 2048


def penalize_(
    logits: torch.Tensor,  # [R, V]
    counts: torch.Tensor,  # [entries, V] int32
    seen: torch.Tensor,  # [entries, V] uint8
    entries: torch.Tensor,  # [R] int64
    values: torch.Tensor,  # [R, 3]
    earlier: torch.Tensor | None = None,  # [R, K] int64
) -> None:
    assert logits.stride(1) == 1 and values.is_contiguous()
    assert counts.is_contiguous() and seen.is_contiguous() and counts.shape[1] == seen.shape[1] == logits.shape[1]
    size = logits.shape[1]
    _penalize_kernel[(triton.cdiv(size, _BLOCK), len(entries))](
        logits,
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


# grid: (blocks, rows)
@triton.jit(do_not_specialize_on_alignment=["entries"])
def _penalize_kernel(
    logits,
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
    row = tl.program_id(1).to(tl.int64)
    entry = tl.load(entries + row).to(tl.int64)
    if entry >= 0:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = token < size
        where = logits + row * stride + token
        x = tl.load(where, mask=mask, other=0.0).to(tl.float32)
        if earlier is not None:
            earlier += row * EARLIER
        x = penalized(x, token, mask, counts + entry * size, seen + entry * size, values + row * 3, earlier, EARLIER)
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


def add_entries_(logits: torch.Tensor, index: torch.Tensor | None, table: torch.Tensor, entries: torch.Tensor) -> None:
    assert logits.stride(1) == 1 and table.is_contiguous() and table.shape[1] == logits.shape[1]
    size = logits.shape[1]
    _add_kernel[(triton.cdiv(size, _BLOCK), len(entries))](
        logits, index, table, entries, logits.stride(0), size, BLOCK=_BLOCK
    )


# grid: (blocks, items)
@triton.jit(do_not_specialize_on_alignment=["index"])
def _add_kernel(logits, index, table, entries, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    entry = tl.load(entries + row).to(tl.int64)
    if entry >= 0:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = token < size
        if index is not None:
            row = tl.load(index + row).to(tl.int64)
        where = logits + row * stride + token
        x = tl.load(where, mask=mask).to(tl.float32) + tl.load(table + entry * size + token, mask=mask).to(tl.float32)
        tl.store(where, x.to(logits.dtype.element_ty), mask=mask)


def forbid_(logits: torch.Tensor, index: torch.Tensor | None, ids: torch.Tensor, active: torch.Tensor) -> None:
    """Sets logits[index[i], ids[i, j]] to -inf where active[i]."""
    _forbid(logits, index, ids, active[:, None].expand(ids.shape))


def forbid_matched_(logits: torch.Tensor, index: torch.Tensor | None, ids: torch.Tensor, matched: torch.Tensor) -> None:
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


# Penalties for tokens that occur in a row, applied to logits when they are loaded.

IN_OUTPUT = tl.constexpr(reference.IN_OUTPUT)


@triton.jit
def find_penalty(row, size, counts, seen, entries, values, earlier, EARLIER: tl.constexpr):
    """The penalty of a row, for `with_penalty`: its entry in the tables, below 0 if the row has none, and its part of
    each table."""
    entry = tl.load(entries + row).to(tl.int64)
    counts += entry * size
    seen += entry * size
    values += row * 3
    if earlier is None:
        return entry, counts, seen, values, values  # the last is not read; a kernel cannot return None
    else:
        return entry, counts, seen, values, earlier + row * EARLIER


@triton.jit
def with_penalty(x, token, mask, size, penalty, EARLIER):
    """x with the penalty of its row, if the row has one. `penalty` None: no row has one."""
    if penalty is not None:
        entry, counts, seen, values, earlier = penalty
        if entry >= 0:
            x = penalized(x, token, mask & (token < size), counts, seen, values, earlier, EARLIER)
    return x


@triton.jit
def penalized(
    x,
    token,
    mask,
    counts,  # [V] of the row
    seen,  # [V] of the row
    values,  # [3] repetition, presence, frequency
    earlier,  # [EARLIER] further tokens of the row's output, -1: none; not read if EARLIER is 0
    EARLIER,
):
    """x with penalties. Counts (4 bytes per token, flags have 1) are loaded only with a frequency penalty."""
    repetition = tl.load(values).to(tl.float32)
    presence = tl.load(values + 1).to(tl.float32)
    frequency = tl.load(values + 2).to(tl.float32)
    flags = tl.load(seen + token, mask=mask, other=0)
    more = tl.zeros_like(x)
    if EARLIER > 0:
        for index in range(EARLIER):
            more += tl.where(token == tl.load(earlier + index), 1.0, 0.0)
        flags = tl.where(more > 0.0, flags | IN_OUTPUT, flags)
    factor = tl.where(flags != 0, repetition, 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    if frequency != 0.0:
        # an explicit fma: find_floor and draw must compute the same bits
        x = tl.fma(-frequency, tl.load(counts + token, mask=mask, other=0).to(tl.float32) + more, x)
    return x - tl.where(flags >= IN_OUTPUT, presence, 0.0)


def num_earlier(penalty: reference.Penalty | None) -> int:
    """Host: number of further tokens per row."""
    return 0 if penalty is None or penalty.earlier is None else penalty.earlier.shape[1]


# Masks of tokens: fetching them from the host, applying them to logits in place, or while a kernel reads logits.

_FETCHED = 1024  # words


def mask_bits_(logits: torch.Tensor, bits: torch.Tensor, entries: torch.Tensor) -> None:
    size = logits.shape[1]
    assert logits.stride(1) == 1 and bits.is_contiguous() and bits.dtype == torch.int32 and bits.shape[1] * 32 >= size
    grid = (triton.cdiv(size, _BLOCK), len(entries))
    _mask_bits_kernel[grid](logits, bits, entries, logits.stride(0), bits.shape[1], size, BLOCK=_BLOCK)


# grid: (blocks, rows)
@triton.jit
def _mask_bits_kernel(logits, bits, entries, stride, num_words, size, BLOCK: tl.constexpr):
    """Blocks without a forbidden token are skipped, and blocks without an allowed one are not read. The others are read
    and written as a whole: vector stores are faster than single ones under a mask."""
    row = tl.program_id(1).to(tl.int64)
    entry = tl.load(entries + row).to(tl.int64)
    first = tl.program_id(0) * (BLOCK // 32)
    index = first + tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    token = index[:, None] * 32 + bit[None, :]
    where = logits + row * stride + token
    if entry >= 0:
        words = tl.load(bits + entry * num_words + index, mask=index < num_words, other=-1)
        if tl.max((words != -1).to(tl.int32), 0) > 0:
            x = tl.full([BLOCK // 32, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
            if tl.max((words != 0).to(tl.int32), 0) > 0:
                x = tl.load(where, mask=token < size, other=0.0)
                x = tl.where(((words[:, None] >> bit[None, :]) & 1) != 0, x, float("-inf"))
            tl.store(where, x, mask=token < size)
    elif entry < -1:
        tl.store(where, float("-inf"), mask=(token < size) & (token != -2 - entry))


@triton.jit
def find_mask(row, bits, mask_entries, mask_index, num_words):
    """The entry of a row's mask, and its bits."""
    entry = tl.load(mask_entries + tl.load(mask_index + row)).to(tl.int64)
    return entry, bits + tl.maximum(entry, 0) * num_words


@triton.jit
def allows_any(bits, entry, start, num_words, PART: tl.constexpr):
    """Whether a mask allows one of the tokens [start, start + PART). `bits`: of the mask, if `entry` >= 0."""
    word = start // 32 + tl.arange(0, PART // 32)
    words = tl.load(bits + word, mask=(word < num_words) & (entry >= 0), other=0)
    only = -2 - entry
    is_here = (entry == -1) | ((only >= start) & (only < start + PART))
    return is_here | (tl.max((words != 0).to(tl.int32), 0) > 0)


@triton.jit
def is_allowed(bits, entry, token, size):
    """Whether a mask allows each token."""
    words = tl.load(bits + token // 32, mask=(token < size) & (entry >= 0), other=0)
    return (((words >> (token % 32)) & 1) != 0) | (token == -2 - entry) | (entry == -1)


def fetch_masks_(
    table: torch.Tensor,
    bits: torch.Tensor,
    targets: torch.Tensor,
    entries: torch.Tensor,
    host_entries: torch.Tensor,
) -> None:
    """The kernel reads pinned host memory: only masks with a target pass the bus."""
    if table.is_cuda and not bits.is_pinned():
        bits, targets, host_entries = (each.to(table.device) for each in (bits, targets, host_entries))
    num_masks, num_words = bits.shape
    assert table.is_contiguous() and bits.is_contiguous() and table.shape[1] == num_words
    assert entries.is_contiguous() and entries.shape == host_entries.shape
    _fetch_kernel[(triton.cdiv(num_words, _FETCHED), num_masks + 1)](
        table, bits, targets, entries, host_entries, num_words, num_masks, len(entries), BLOCK=_FETCHED
    )


# grid: (blocks of words, masks and one for the entries)
@triton.jit(do_not_specialize=["num_masks", "num_entries"])
def _fetch_kernel(table, bits, targets, entries, host_entries, num_words, num_masks, num_entries, BLOCK: tl.constexpr):
    mask = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if mask == num_masks:
        for start in range(0, num_entries, tl.num_programs(0) * BLOCK):
            index = start + block
            tl.store(entries + index, tl.load(host_entries + index, mask=index < num_entries), mask=index < num_entries)
    else:
        target = tl.load(targets + mask).to(tl.int64)
        if target >= 0:
            words = tl.load(bits + mask * num_words + block, mask=block < num_words)
            tl.store(table + target * num_words + block, words, mask=block < num_words)
