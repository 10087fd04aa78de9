"""Lists the rows of one token of a step, and how programs share their splits: records of `TileList`.

A decode step begins with this kernel, before which the device is idle: its latency counts. So programs are small, loads
do not wait for each other, and the code is short, since none of it is in the instruction cache. Each program counts the
rows before its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.platform.pdl import dependent, wait_for_previous

SPLIT_COST = tl.constexpr(64)  # fixed cost of a split, in keys
SINGLE_RECORD = tl.constexpr(9)  # int32s per single
MIN_BLOCK, MAX_BLOCK = 32, 256  # rows that a program counts at once


def list_singles(
    singles: torch.Tensor,  # those of a TileList
    shares: torch.Tensor,
    totals: torch.Tensor,
    arrived: torch.Tensor,
    lengths: torch.Tensor,  # those of the rows
    host_ids: torch.Tensor | None,
    page_table: torch.Tensor,
    row_splits: int,  # capacity of a row
    usual_rows: int,  # at least as many are counted at once
    **constants: int,
) -> None:
    """Fills the list of a step in which every row has one token."""
    num_rows = len(lengths)
    block = min(max(MIN_BLOCK, triton.next_power_of_2(max(num_rows, usual_rows))), MAX_BLOCK)
    _list_singles_kernel[(num_rows,)](
        singles,
        shares,
        totals,
        arrived,
        lengths,
        host_ids,
        page_table,
        page_table.stride(0),
        num_rows,
        len(shares) - 1,
        row_splits,
        KV_HEADS=arrived.shape[1],
        BLOCK=block,
        WHOLE=num_rows <= block,
        num_warps=max(1, block // 64),
        **constants,
        **dependent(lengths.device, num_rows),
    )


# grid: (rows,)
@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "num_shares", "row_splits"],
    do_not_specialize_on_alignment=["lengths", "host_ids", "table"],
)
def _list_singles_kernel(
    singles,
    shares,
    totals,
    arrived,
    lengths,
    host_ids,
    table,
    table_stride,
    num_rows,
    num_shares,
    row_splits,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # all rows are one block
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)  # and nothing is released: attention reads the list before its own wait
    row = tl.program_id(0)
    fresh = 0  # keys that the step writes
    if host_ids is not None:
        fresh = -tl.load(host_ids + row).to(tl.int32)
    cost_of_all = tl.cast(0, tl.int64)
    cost_before = tl.cast(0, tl.int64)
    splits_before = 0
    singles_before = 0
    first_query = 0
    is_last = 0  # of its single
    has_host_ids = 0
    for first in range(0, BLOCK if WHOLE else num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        if host_ids is not None:
            given = tl.load(host_ids + rows, mask=rows < num_rows, other=-1)
            has_host_ids = tl.maximum(has_host_ids, tl.max((given >= 0).to(tl.int32)))
        length = read_length(rows, lengths, table, table_stride, num_rows, PAGE)
        begin, size, splits = cut_keys(length, WINDOW, MIN_SPLIT, ONE_SPLIT, MAX_SPLITS, STEP)
        ends = rows < num_rows
        if QUERIES > 1:
            # the next row is a query of the same single: the next position of a drafted row, whose keys are cut in the
            # same way
            next_length = read_length(rows + 1, lengths, table, table_stride, num_rows, PAGE)
            next_begin, next_size, _ = cut_keys(next_length, WINDOW, MIN_SPLIT, ONE_SPLIT, MAX_SPLITS, STEP)
            offset = -1 - tl.load(host_ids + rows + 1, mask=rows + 1 < num_rows, other=-1).to(tl.int32)
            continues = (offset > 0) & (offset % QUERIES != 0) & (next_length == length + 1)
            ends = ends & ~(continues & (next_begin == begin) & (next_size == size))
        is_before = ends & (rows < row)
        cost = tl.where(ends, length - begin + splits * SPLIT_COST, 0).to(tl.int64)
        cost_of_all += tl.sum(cost)
        cost_before += tl.sum(tl.where(is_before, cost, 0))
        if QUERIES > 1:
            singles_before += tl.sum(is_before.to(tl.int32))
            first_query = tl.maximum(first_query, tl.max(tl.where(is_before, rows + 1, 0)))
            is_last = tl.maximum(is_last, tl.max((ends & (rows == row)).to(tl.int32)))
        else:
            splits_before += tl.sum(tl.where(is_before, splits, 0))
    own_length = read_length(row, lengths, table, table_stride, num_rows, PAGE)
    settled = 0
    if host_ids is not None:
        # a host token may complete a page that others read
        settled = tl.where(has_host_ids > 0, 0, tl.maximum(own_length - fresh, 0))
    if QUERIES > 1:
        queries = tl.minimum(row - first_query + 1, QUERIES)
        splits_before = (row - queries + 1) * row_splits
    else:
        singles_before = row
        queries = 1
        is_last = 1
    if is_last > 0:
        begin, size, splits = cut_keys(own_length, WINDOW, MIN_SPLIT, ONE_SPLIT, MAX_SPLITS, STEP)
        fields = (begin, size, splits, splits_before, own_length, settled, queries)
        store_single(singles, shares, singles_before, row, row, fields, cost_before, cost_of_all, num_shares, BLOCK)
    head = tl.arange(0, triton.next_power_of_2(KV_HEADS))
    tl.store(arrived + row * KV_HEADS + head, 0, mask=head < KV_HEADS)
    if row == num_rows - 1:
        tl.store(totals, singles_before + 1)
        tl.store(totals + 1, 0)
        tl.store(shares + num_shares * 2, singles_before + 1)
        tl.store(shares + num_shares * 2 + 1, 0)


@triton.jit
def store_single(
    singles, shares, number, row, token, fields, cost_before, cost_of_all, num_shares, LANES: tl.constexpr
):
    """Stores a single whose last query is this row, and the shares that start in it, each at the split nearest to its
    equal part of the total cost."""
    begin, size, splits, splits_before, length, settled, queries = fields
    record = singles + tl.cast(number, tl.int64) * SINGLE_RECORD
    tl.store(record, row - queries + 1)
    tl.store(record + 1, token - queries + 1)
    tl.store(record + 2, begin)
    tl.store(record + 3, size)
    tl.store(record + 4, splits)
    tl.store(record + 5, splits_before)
    tl.store(record + 6, length)
    tl.store(record + 7, settled)
    tl.store(record + 8, queries)
    cost = length - begin + splits * SPLIT_COST
    for first in range(0, num_shares, LANES):
        share = first + tl.arange(0, LANES)
        ahead = share * cost_of_all - cost_before * num_shares  # the start of the share, times the number of shares
        mask = (share < num_shares) & (ahead >= 0) & (ahead < tl.cast(cost, tl.int64) * num_shares)
        offset = (ahead // num_shares).to(tl.int32)
        nearest = tl.minimum((2 * offset + size + SPLIT_COST) // (2 * (size + SPLIT_COST)), splits - 1)
        # the last split may be short: its end may be nearer than its start
        nearest = tl.where(2 * offset < (splits - 1) * (size + SPLIT_COST) + cost, nearest, splits)
        tl.store(shares + share * 2, number, mask=mask)
        tl.store(shares + share * 2 + 1, nearest, mask=mask)


# Device functions of the tile list: the rows of a step, and how their keys are cut.

ALIGN = tl.constexpr(128)  # the first split of a window starts at a multiple of it; the key block size divides it


@triton.jit
def read_rows(
    row, lengths, starts, table, table_stride, num_rows, num_tokens, HAS_STARTS: tl.constexpr, PAGE: tl.constexpr
):
    """First token, number of tokens and length of one or many rows; row `num_rows` has the remaining (padding)
    tokens."""
    mine = row < num_rows
    if HAS_STARTS:
        start = tl.load(starts + row, mask=row <= num_rows, other=0)
        stop = tl.where(mine, tl.load(starts + row + 1, mask=mine, other=0), num_tokens)
        count = stop - start
    else:
        start = row
        count = tl.where(mine, 1, 0)
    return start, count, read_length(row, lengths, table, table_stride, num_rows, PAGE)


@triton.jit
def read_length(row, lengths, table, table_stride, num_rows, PAGE: tl.constexpr):
    """Length of one or many rows; 0 past the last one."""
    mine = row < num_rows
    length = tl.load(lengths + row, mask=mine, other=0).to(tl.int32)
    last = tl.maximum(length - 1, 0) // PAGE
    page = tl.load(table + row.to(tl.int64) * table_stride + last, mask=mine & (length > 0), other=0)
    # a row whose newest position is in the null page is padding
    return tl.where(page == 0, 0, length)


@triton.jit
def cut_keys(
    length,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    STEP: tl.constexpr,
):
    """First key of the first split, keys per split, number of splits (1 for padding: its output is written too). A row
    with up to ONE_SPLIT keys has one. The splits of a longer row are about equal: as many as MIN_SPLIT allows, of a
    multiple of STEP keys."""
    begin = length * 0
    if WINDOW:
        begin = tl.maximum(length - WINDOW, 0) // ALIGN * ALIGN
    keys = length - begin
    splits = tl.maximum(tl.minimum(tl.cdiv(keys, MIN_SPLIT), MAX_SPLITS), 1)
    splits = tl.where(keys <= ONE_SPLIT, 1, splits)
    size = tl.where(splits > 1, tl.cdiv(tl.cdiv(keys, splits), STEP) * STEP, ONE_SPLIT)
    return begin, size, tl.maximum(tl.cdiv(keys, size), 1)
