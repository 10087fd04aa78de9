"""The attention work of one step, listed on the device.

Rows of one token are cut along their keys, rows of more along their queries. The lists are made from device lengths
once a step and serve all layers of one window; attention kernels run a fixed grid over them, so a launch looks the
same whatever the lengths are and can be captured.

How a row is cut depends on its own length alone: its sums have the same order alone and among others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# A row of one token is cut every MIN_SPLIT keys, and every 2, 4, 8... times as many where that is over MAX_SPLITS cuts.
MIN_SPLIT = 256
MAX_SPLITS = 32

RECORD = tl.constexpr(8)  # int32s of one piece of work


@dataclass(frozen=True, slots=True)
class Work:
    """`splits`: row, token, begin, end, index, number of splits of the row, length. `tiles`: row, first token, number
    of tokens, first query of the tile, length. A length of 0 marks padding, whose output is zero."""

    splits: torch.Tensor  # [capacity, RECORD] int32
    tiles: torch.Tensor  # [capacity, RECORD] int32, longest first within a row
    totals: torch.Tensor  # [2] int32, how many of each there are
    arrived: torch.Tensor  # [B, kv heads] int32, splits done; 0 between kernels


def list_work(
    lengths: torch.Tensor,  # [B] int64
    query_starts: torch.Tensor | None,  # [B + 1] int32; None: one token a row
    page_table: torch.Tensor,  # [B, width] int64
    num_tokens: int,
    max_length: int,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    tile: int,
    window: int = 0,
    min_split: int = MIN_SPLIT,
    max_splits: int = MAX_SPLITS,
) -> Work:
    """Lists the work of B rows. Capacities follow from shapes and `max_length`, never from what the device holds."""
    num_rows = len(lengths)
    assert query_starts is not None or num_tokens == num_rows, f"{num_tokens} tokens in {num_rows} rows and no starts"
    assert page_table.stride(1) == 1
    group = num_heads // num_kv_heads
    device = lengths.device
    num_splits = num_rows * most_splits(max_length, window, min_split, max_splits)
    num_tiles = 0 if query_starts is None else num_tokens * group // tile + num_rows + 1
    work = Work(
        torch.empty(num_splits, RECORD.value, dtype=torch.int32, device=device),
        torch.empty(num_tiles, RECORD.value, dtype=torch.int32, device=device),
        torch.empty(2, dtype=torch.int32, device=device),
        torch.empty(num_rows, num_kv_heads, dtype=torch.int32, device=device),
    )
    _list_work_kernel[(num_rows + 1,)](
        work.splits,
        work.tiles,
        work.totals,
        work.arrived,
        lengths,
        query_starts,
        page_table,
        page_table.stride(0),
        num_rows,
        num_tokens,
        HAS_STARTS=query_starts is not None,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        PAGE=page_size,
        WINDOW=window,
        TILE=tile,
        MIN_SPLIT=min_split,
        MAX_SPLITS=max_splits,
        BLOCK=256,
        num_warps=4,
    )
    return work


def most_splits(max_length: int, window: int = 0, min_split: int = MIN_SPLIT, max_splits: int = MAX_SPLITS) -> int:
    """Of any row of up to `max_length` positions."""
    if window:
        max_length = min(max_length, window + ALIGN.value)
    return max(1, min(max_splits, triton.cdiv(max_length, min_split)))


ALIGN = tl.constexpr(128)  # a window's first split begins at a multiple of it; blocks of keys divide it


# grid: (rows + 1,); program b counts the work of the rows before row b and lists row b's. The last one takes tokens
# that belong to no row.
@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["lengths", "starts", "table"],
)
def _list_work_kernel(
    splits_out,
    tiles_out,
    totals,
    arrived,
    lengths,
    starts,
    table,
    table_stride,
    num_rows,
    num_tokens,
    HAS_STARTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    splits_before = 0
    tiles_before = 0
    for first in range(0, row, BLOCK):
        rows = first + lanes
        start, count, length = _read_rows(
            rows, lengths, starts, table, table_stride, num_rows, num_tokens, HAS_STARTS, PAGE
        )
        begin, size, splits = _cut_keys(length, WINDOW, MIN_SPLIT, MAX_SPLITS)
        single = count == 1
        splits_before += tl.sum(tl.where((rows < row) & single, splits, 0))
        tiles_before += tl.sum(tl.where((rows < row) & ~single, tl.cdiv(count * GROUP, TILE), 0))

    start, count, length = _read_rows(row, lengths, starts, table, table_stride, num_rows, num_tokens, HAS_STARTS, PAGE)
    if count == 1:
        begin, size, splits = _cut_keys(length, WINDOW, MIN_SPLIT, MAX_SPLITS)
        for first in range(0, splits, BLOCK):
            index = first + lanes
            mask = index < splits
            record = splits_out + (splits_before + index).to(tl.int64) * RECORD
            tl.store(record, row, mask=mask)
            tl.store(record + 1, start, mask=mask)
            tl.store(record + 2, begin + index * size, mask=mask)
            tl.store(record + 3, tl.minimum(begin + index * size + size, length), mask=mask)
            tl.store(record + 4, index, mask=mask)
            tl.store(record + 5, splits, mask=mask)
            tl.store(record + 6, length, mask=mask)
        splits_before += splits
    else:
        tiles = tl.cdiv(count * GROUP, TILE)
        for first in range(0, tiles, BLOCK):
            index = first + lanes
            mask = index < tiles
            record = tiles_out + (tiles_before + index).to(tl.int64) * RECORD
            tl.store(record, row, mask=mask)
            tl.store(record + 1, start, mask=mask)
            tl.store(record + 2, count, mask=mask)
            tl.store(record + 3, (tiles - 1 - index) * TILE, mask=mask)
            tl.store(record + 4, length, mask=mask)
        tiles_before += tiles

    if row == num_rows:
        tl.store(totals, splits_before)
        tl.store(totals + 1, tiles_before)
    else:
        for head in tl.static_range(KV_HEADS):
            tl.store(arrived + row * KV_HEADS + head, 0)


@triton.jit
def _read_rows(
    row, lengths, starts, table, table_stride, num_rows, num_tokens, HAS_STARTS: tl.constexpr, PAGE: tl.constexpr
):
    """First token, number of tokens and length of one or many rows; row `num_rows` has what is left of the tokens."""
    mine = row < num_rows
    if HAS_STARTS:
        start = tl.load(starts + row, mask=row <= num_rows, other=0)
        stop = tl.where(mine, tl.load(starts + row + 1, mask=mine, other=0), num_tokens)
        count = stop - start
    else:
        start = row
        count = tl.where(mine, 1, 0)
    length = tl.load(lengths + row, mask=mine, other=0).to(tl.int32)
    last = tl.maximum(length - 1, 0) // PAGE
    page = tl.load(table + row.to(tl.int64) * table_stride + last, mask=mine & (length > 0), other=0)
    # a row whose newest position lies in page 0 is padding
    return start, count, tl.where(page == 0, 0, length)


@triton.jit
def _cut_keys(length, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """First key of the first split, keys of one split, number of splits (1 for padding: its output is written too)."""
    begin = length * 0
    if WINDOW:
        begin = tl.maximum(length - WINDOW, 0) // ALIGN * ALIGN
    size = length * 0 + MIN_SPLIT
    for _ in tl.static_range(14):
        size = tl.where(size * MAX_SPLITS < length - begin, size * 2, size)
    return begin, size, tl.maximum(tl.cdiv(length - begin, size), 1)
