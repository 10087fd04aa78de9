"""Device functions of the tile list: the rows of a step, and how their keys are cut."""

from __future__ import annotations

import triton
import triton.language as tl

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
