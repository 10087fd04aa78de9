"""Sorts (token, expert) pairs by expert and splits each expert's range into tiles, on the device.

A pair is identified by its index in the routing: token * top_k + choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # pairs per loop iteration


class ExpertTiles(NamedTuple):
    order: torch.Tensor  # [pairs] pairs sorted by expert, stable
    table: torch.Tensor  # [3, max tiles] expert (-1: no tile), first index in `order`, end of the expert's range
    size: int  # pairs per tile


def sort_by_expert(ids: torch.Tensor, num_experts: int, size: int) -> ExpertTiles:
    """The tiles of ids [tokens, top_k]. The table size follows from shapes only."""
    num_pairs = ids.numel()
    max_tiles = triton.cdiv(num_pairs, size) + min(num_experts, num_pairs)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    table = torch.empty(3, max_tiles, dtype=torch.int32, device=ids.device)
    _sort_kernel[(num_experts,)](
        ids,
        order,
        table,
        num_pairs,
        max_tiles,
        num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        SIZE=size,
        BLOCK=min(_BLOCK, max(triton.next_power_of_2(num_pairs), 32)),
        num_warps=4 if num_pairs <= 1024 else 16,
    )
    return ExpertTiles(order, table, size)


# grid: (experts,): each program finds the pairs of its own expert
@triton.jit
def _sort_kernel(
    ids,
    order,
    table,
    num_pairs,
    max_tiles,
    num_experts,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + lane
        found = tl.load(ids + pair, mask=pair < num_pairs, other=num_experts)  # lanes past the end have a bin
        counts += tl.histogram(found, BINS).to(tl.int32)
    tiles = (counts + SIZE - 1) // SIZE
    start = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    place = start
    for first in range(0, num_pairs, BLOCK):
        pair = first + lane
        mine = tl.load(ids + pair, mask=pair < num_pairs, other=num_experts) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + rank - 1, pair, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
    for first in range(0, count, SIZE):
        tl.store(table + tile, expert)
        tl.store(table + max_tiles + tile, start + first)
        tl.store(table + 2 * max_tiles + tile, start + count)
        tile += 1
    if expert == num_experts - 1:
        for unused in range(tile, max_tiles):
            tl.store(table + unused, -1)
