"""The order of a step's tiles, for the kernel of tile_list.py.

Tiles are sorted longest first, so that equal shares of them take equal time. Rows with many tiles are sorted only
within groups of adjacent rows with up to KEYS_TOGETHER keys in total, so that the keys of a group stay in the L2
cache. A row with more than half as many keys is a group of its own. Rows with fewer than FEW_TILES tiles reuse few
keys and come first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.ops.paged_attention.tile_rows import read_rows

KEYS_TOGETHER = 12288
FEW_TILES = tl.constexpr(8)


@triton.jit
def last_key(query, count, length, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Number of keys up to the last one visible to a tile that starts with this query."""
    seen = length - count + (query + TILE - 1) // GROUP + 1
    return tl.where(length > 0, tl.minimum(length, seen), 0)


@triton.jit
def held_keys(tiles, length, TOGETHER: tl.constexpr):
    """Keys of a row that count towards the limit of its sorting group."""
    whole = tl.cdiv(length, TOGETHER) * TOGETHER
    return tl.where(tiles < FEW_TILES, 0, tl.where(2 * length > TOGETHER, whole, length)).to(tl.int64)


@triton.jit
def sorting_group(tiles, before, held, TOGETHER: tl.constexpr):
    """Index of the sorting group of a row, from the running number of its last key; 0: rows with few tiles."""
    return tl.where(tiles < FEW_TILES, 0, 1 + (before + tl.maximum(held, 1) - 1) // TOGETHER)


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
        held = held_keys(tiles, length, TOGETHER)
        if tl.sum(tiles) > 0:
            groups = sorting_group(tiles, keys_before + tl.cumsum(held, 0) - held, held, TOGETHER)
            tiles = tl.where(rows == row, 0, tiles)
            # visible keys increase with the tiles of a row: the tiles with more than some number are a suffix
            limit = keys[None, :] - tl.where(rows < row, 1, 0)[:, None]
            past = limit - tl.where(length > 0, length - count, 0)[:, None]
            fewer = tl.minimum(tl.maximum(past, 0) * GROUP // TILE, tiles[:, None])
            more = tl.where(length[:, None] > limit, tiles[:, None] - fewer, 0)
            mine = tl.where((groups == own_group)[:, None], more, 0)
            mine = tl.where((groups < own_group)[:, None], tiles[:, None], mine)
            ahead += tl.sum(mine, 0)
        keys_before += tl.sum(held)
    return ahead
