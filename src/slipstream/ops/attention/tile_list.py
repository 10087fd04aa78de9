"""TileList: the tiles and splits of one step's attention, listed on the device.

Rows of one token are split along their keys, longer rows along their queries. The lists are built from device lengths
once per step and serve all sites of a cache group; attention kernels run a fixed grid over them, so a launch does not
depend on the lengths and can be captured.

The splits of a row depend on its length and on the row capacity of the step (small, medium or large): the order of its
sums is the same in all steps of one kind, independent of the other rows. Consecutive splits form a share, and all
shares cost about the same; which program computes a split depends on all rows.

In a step with drafts, rows that are consecutive positions of one drafted row form one single of several queries, so
that their keys are read once. They do so only if the keys of each are cut in the same way: then every query has the
splits and the order of sums that it has alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slipstream.config.buffer_size import MAX_SPLITS, SMALLEST_SPLIT
from slipstream.ops.attention.single_list import (
    ALIGN,
    SINGLE_RECORD,
    SPLIT_COST,
    cut_keys,
    list_singles,
    read_rows,
    store_single,
)

# The order of a step's tiles, for the kernel of tile_list.py.
#
# Tiles are sorted longest first, so that equal shares of them take equal time. Rows with many tiles are sorted only
# within groups of adjacent rows with up to KEYS_TOGETHER keys in total, so that the keys of a group stay in the L2
# cache. A row with more than half as many keys is a group of its own. Rows with fewer than FEW_TILES tiles reuse few
# keys and come first.

KEYS_TOGETHER = 12288
FEW_TILES = tl.constexpr(8)


@triton.jit
def last_key(query, count, length, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Number of keys up to the last one visible to a tile that starts with this query."""
    seen = length - count + (query + TILE - 1) // GROUP + 1
    return tl.where(length > 0, tl.minimum(length, seen), 0)


@triton.jit
def keys_read(tiles, length, TOGETHER: tl.constexpr):
    """Keys of a row that count towards the limit of its sorting group."""
    whole = tl.cdiv(length, TOGETHER) * TOGETHER
    return tl.where(tiles < FEW_TILES, 0, tl.where(2 * length > TOGETHER, whole, length)).to(tl.int64)


@triton.jit
def sorting_group(tiles, before, num_keys, TOGETHER: tl.constexpr):
    """Index of the sorting group of a row, from the running number of its last key; 0: rows with few tiles."""
    return tl.where(tiles < FEW_TILES, 0, 1 + (before + tl.maximum(num_keys, 1) - 1) // TOGETHER)


@triton.jit
def tiles_ahead(
    row,
    keys,  # [TILES] visible to a tile of this row
    own_group,  # sorting group of this row
    lengths,
    starts,
    table,
    table_stride,
    num_rows,
    num_tokens,
    HAS_STARTS: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,
    CUT_SINGLES: tl.constexpr,
):
    """How many tiles of other rows come before each of these: all tiles of earlier groups, tiles of the same group with
    more keys, and tiles of earlier rows with equally many."""
    ROWS: tl.constexpr = 64
    lanes = tl.arange(0, ROWS)
    ahead = keys * 0
    keys_before = tl.cast(0, tl.int64)
    for first in range(0, num_rows + 1, ROWS):
        rows = first + lanes
        start, count, length = read_rows(
            rows, lengths, starts, table, table_stride, num_rows, num_tokens, HAS_STARTS, PAGE
        )
        single = (count == 1) & CUT_SINGLES
        tiles = tl.where((rows <= num_rows) & ~single, tl.cdiv(count * GROUP, TILE), 0)
        num_keys = keys_read(tiles, length, TOGETHER)
        if tl.sum(tiles) > 0:
            groups = sorting_group(tiles, keys_before + tl.cumsum(num_keys, 0) - num_keys, num_keys, TOGETHER)
            tiles = tl.where(rows == row, 0, tiles)
            # visible keys increase with the tiles of a row: the tiles with more than some number are a suffix
            limit = keys[None, :] - tl.where(rows < row, 1, 0)[:, None]
            past = limit - tl.where(length > 0, length - count, 0)[:, None]
            fewer = tl.minimum(tl.maximum(past, 0) * GROUP // TILE, tiles[:, None])
            more = tl.where(length[:, None] > limit, tiles[:, None] - fewer, 0)
            mine = tl.where((groups == own_group)[:, None], more, 0)
            mine = tl.where((groups < own_group)[:, None], tiles[:, None], mine)
            ahead += tl.sum(mine, 0)
        keys_before += tl.sum(num_keys)
    return ahead


# Maximum keys per split of a row of one token, more for rows that would have more than MAX_SPLITS splits. Few rows need
# many splits to keep the device busy; with many rows a split should amortize its fixed cost.
FEW_ROWS, SPLIT_OF_FEW = 8, SMALLEST_SPLIT
SOME_ROWS, SPLIT_OF_SOME = 128, 512
SPLIT_OF_MANY = 1024
SPLIT_OF_ROW_PROGRAM = 1024  # if each row and KV head has a program of its own anyway
KEY_BLOCK, FEW_KEY_BLOCK = 64, 128  # keys per split are a multiple of the key block of every kernel

RECORD = tl.constexpr(8)  # int32s per tile


@dataclass(frozen=True, slots=True)
class TileList:
    """`singles`, rows of one token: row, token, first key, keys of one split, number of splits, index of the first
    partial result, length, keys that existed before the step, number of queries. With several queries: row and token of
    the first, length of the last. `tiles`: row, first token, number of tokens, first query of the tile, length. A
    length of 0 marks padding, whose output is zero."""

    singles: torch.Tensor  # [B + 1, SINGLE_RECORD] int32
    shares: torch.Tensor  # [shares + 1, 2] int32: first single of a share, and first split of that single
    tiles: torch.Tensor  # [capacity, RECORD] int32, most keys first within a group of rows
    totals: torch.Tensor  # [2] int32, number of singles, number of tiles
    arrived: torch.Tensor  # [B, kv heads] int32, finished splits; 0 between kernels
    num_splits: int  # of all rows together
    max_queries: int = 1  # of a single
    row_programs: bool = False  # see `TileListSplits`

    @property
    def has_large_blocks(self) -> bool:
        """Whether a multiprocessor runs one program, with large key blocks."""
        return self.row_programs or self.has_few_rows

    @property
    def has_few_rows(self) -> bool:
        return num_distinct(len(self.singles) - 1, self.max_queries) <= FEW_ROWS


@dataclass(frozen=True, slots=True)
class TileListRows:
    """The B rows and T tokens of a step."""

    lengths: torch.Tensor  # [B] int64
    query_starts: torch.Tensor | None  # [B + 1] int32; None: one token per row
    page_table: torch.Tensor  # [B, width] int64
    num_tokens: int
    max_length: int  # at least every length
    # [T] int64, token ids from the host, -1: the token that the device drew last, -2: the first draft, and so on. In a
    # step of one token per row without token ids of the host, all keys before that of the token drawn last existed
    # before the step. None: not known
    host_ids: torch.Tensor | None = None
    # a single has up to so many queries: consecutive rows whose host_ids are -1, -2, -3 and so on
    max_queries: int = 1


@dataclass(frozen=True, slots=True)
class TileListHeads:
    num_heads: int
    num_kv_heads: int
    page_size: int
    tile: int  # queries x heads per tile
    window: int = 0  # 0: all keys are visible


@dataclass(frozen=True, slots=True)
class TileListSplits:
    num_split_programs: int = 1  # maximum number of shares
    min_split: int | None = None  # minimum keys per split; None: by the number of rows
    one_split: int = 0  # rows with up to so many keys are not split, or with up to `min_split`
    max_splits: int = MAX_SPLITS
    keys_together: int = KEYS_TOGETHER
    cut_singles: bool = True  # False: rows of one token are tiles too, and one kernel computes everything
    row_programs: bool = False  # programs of one row and KV head each fill the device: short rows are not split


def build_tile_list(rows: TileListRows, heads: TileListHeads, cuts: TileListSplits) -> TileList:
    """Launches the kernel that lists the tiles of a step. Capacities follow from shapes and `max_length` alone."""
    lengths, query_starts, page_table = rows.lengths, rows.query_starts, rows.page_table
    num_rows, num_tokens = len(lengths), rows.num_tokens
    assert query_starts is not None or num_tokens == num_rows, f"{num_tokens} tokens in {num_rows} rows and no starts"
    assert page_table.stride(1) == 1
    group = heads.num_heads // heads.num_kv_heads
    device = lengths.device
    assert rows.max_queries == 1 or (query_starts is None and rows.host_ids is not None and cuts.cut_singles)
    by_rows = SPLIT_OF_ROW_PROGRAM if cuts.row_programs else split_keys(num_distinct(num_rows, rows.max_queries))
    min_split = cuts.min_split or by_rows
    num_splits = num_rows * max_splits_of_row(rows.max_length, heads.window, min_split, cuts.max_splits)
    has_tiles = query_starts is not None or not cuts.cut_singles
    num_tiles = num_tokens * group // heads.tile + num_rows + 1 if has_tiles else 0
    tile_list = TileList(
        torch.empty(num_rows + 1, SINGLE_RECORD.value, dtype=torch.int32, device=device),
        torch.empty(min(cuts.num_split_programs, num_splits) + 1, 2, dtype=torch.int32, device=device),
        torch.empty(num_tiles, RECORD.value, dtype=torch.int32, device=device),
        torch.empty(2, dtype=torch.int32, device=device),
        torch.empty(num_rows, heads.num_kv_heads, dtype=torch.int32, device=device),
        num_splits,
        rows.max_queries,
        cuts.row_programs,
    )
    common = {
        "PAGE": heads.page_size,
        "WINDOW": heads.window,
        "MIN_SPLIT": min_split,
        "ONE_SPLIT": max(min_split, cuts.one_split),
        "MAX_SPLITS": cuts.max_splits,
        "STEP": FEW_KEY_BLOCK if tile_list.has_large_blocks else KEY_BLOCK,
    }
    if not has_tiles:
        list_singles(
            tile_list.singles,
            tile_list.shares,
            tile_list.totals,
            tile_list.arrived,
            lengths,
            rows.host_ids,
            page_table,
            num_splits // num_rows,
            # one kernel for all steps whose splits are those of few rows
            FEW_ROWS * rows.max_queries if tile_list.has_few_rows else 0,
            QUERIES=rows.max_queries,
            **common,
        )
        return tile_list
    _list_tiles_kernel[(num_rows + 1,)](
        tile_list.singles,
        tile_list.shares,
        tile_list.tiles,
        tile_list.totals,
        tile_list.arrived,
        lengths,
        query_starts,
        page_table,
        page_table.stride(0),
        num_rows,
        num_tokens,
        len(tile_list.shares) - 1,
        HAS_STARTS=query_starts is not None,
        KV_HEADS=heads.num_kv_heads,
        GROUP=group,
        TILE=heads.tile,
        TOGETHER=cuts.keys_together,
        CUT_SINGLES=cuts.cut_singles,
        BLOCK=256,
        num_warps=4,
        **common,
    )
    return tile_list


def num_distinct(num_rows: int, max_queries: int) -> int:
    """Number of rows in a step with a capacity of `num_rows`, if each is counted once for all its positions."""
    return triton.cdiv(num_rows, max_queries)


def split_keys(num_rows: int) -> int:
    """Keys per split in a step with a capacity of `num_rows` rows."""
    if num_rows <= FEW_ROWS:
        return SPLIT_OF_FEW
    return SPLIT_OF_SOME if num_rows <= SOME_ROWS else SPLIT_OF_MANY


def max_splits_of_row(
    max_length: int, window: int = 0, min_split: int = SPLIT_OF_FEW, max_splits: int = MAX_SPLITS
) -> int:
    """Maximum number of splits of a row with up to `max_length` positions."""
    if window:
        max_length = min(max_length, window + ALIGN.value)
    return max(1, min(max_splits, triton.cdiv(max_length, min_split)))


TILES = tl.constexpr(64)  # listed per loop iteration


# grid: (rows + 1,); program b counts the tiles of the rows before row b and lists row b's. The last one takes tokens
# that belong to no row.
@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "num_tokens", "num_split_programs"],
    do_not_specialize_on_alignment=["lengths", "starts", "table"],
)
def _list_tiles_kernel(
    singles_out,
    shares_out,
    tiles_out,
    totals,
    arrived,
    lengths,
    starts,
    table,
    table_stride,
    num_rows,
    num_tokens,
    num_split_programs,
    HAS_STARTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    TOGETHER: tl.constexpr,
    CUT_SINGLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    singles_before = 0
    splits_before = 0
    tiles_before = 0
    keys_before = tl.cast(0, tl.int64)  # of rows with many tiles
    cost_before = tl.cast(0, tl.int64)  # of splits
    cost_of_all = tl.cast(0, tl.int64)
    for first in range(0, num_rows + 1, BLOCK):
        rows = first + lanes
        start, count, length = read_rows(
            rows, lengths, starts, table, table_stride, num_rows, num_tokens, HAS_STARTS, PAGE
        )
        begin, size, splits = cut_keys(length, WINDOW, MIN_SPLIT, ONE_SPLIT, MAX_SPLITS, STEP)
        single = (count == 1) & CUT_SINGLES
        cost = tl.where((rows <= num_rows) & single, length - begin + splits * SPLIT_COST, 0).to(tl.int64)
        cost_of_all += tl.sum(cost)
        cost_before += tl.sum(tl.where(rows < row, cost, 0))
        singles_before += tl.sum(((rows < row) & single).to(tl.int32))
        splits_before += tl.sum(tl.where((rows < row) & single, splits, 0))
        tiles = tl.where((rows < row) & ~single, tl.cdiv(count * GROUP, TILE), 0)
        tiles_before += tl.sum(tiles)
        keys_before += tl.sum(keys_read(tiles, length, TOGETHER))

    start, count, length = read_rows(row, lengths, starts, table, table_stride, num_rows, num_tokens, HAS_STARTS, PAGE)
    if (count == 1) & CUT_SINGLES:
        begin, size, splits = cut_keys(length, WINDOW, MIN_SPLIT, ONE_SPLIT, MAX_SPLITS, STEP)
        fields = (begin, size, splits, splits_before, length, 0, 1)
        store_single(
            singles_out,
            shares_out,
            singles_before,
            row,
            start,
            fields,
            cost_before,
            cost_of_all,
            num_split_programs,
            BLOCK,
        )
        singles_before += 1
    else:
        tiles = tl.cdiv(count * GROUP, TILE)
        tile_lanes = tl.arange(0, TILES)
        for first in range(0, tiles, TILES):
            index = first + tile_lanes
            mask = index < tiles
            query = (tiles - 1 - index) * TILE
            target = index + tiles_ahead(
                row,
                last_key(query, count, length, GROUP, TILE),
                sorting_group(tiles, keys_before, keys_read(tiles, length, TOGETHER), TOGETHER),
                lengths,
                starts,
                table,
                table_stride,
                num_rows,
                num_tokens,
                HAS_STARTS,
                PAGE,
                GROUP,
                TILE,
                TOGETHER,
                CUT_SINGLES,
            )
            record = tiles_out + target.to(tl.int64) * RECORD
            tl.store(record, row, mask=mask)
            tl.store(record + 1, start, mask=mask)
            tl.store(record + 2, count, mask=mask)
            tl.store(record + 3, query, mask=mask)
            tl.store(record + 4, length, mask=mask)
        tiles_before += tiles

    if row == num_rows:
        tl.store(totals, singles_before)
        tl.store(totals + 1, tiles_before)
        # the end of the last share; of all shares if there are no splits
        for first in range(tl.where(cost_of_all > 0, num_split_programs, 0), num_split_programs + 1, BLOCK):
            share = first + lanes
            tl.store(shares_out + share * 2, singles_before, mask=share <= num_split_programs)
            tl.store(shares_out + share * 2 + 1, 0, mask=share <= num_split_programs)
    else:
        for head in tl.static_range(KV_HEADS):
            tl.store(arrived + row * KV_HEADS + head, 0)
