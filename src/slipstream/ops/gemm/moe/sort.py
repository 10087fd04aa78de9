"""Sorts (token, expert) pairs by expert and splits each expert's range into tiles, on the device.

A pair is identified by its index in the routing: token * top_k + choice. Few pairs take one launch, in which each
program reads all of them. Many take three: counts per block of pairs, their sums, and the offsets within a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.moe.reference import CLAMP_ALPHA, CLAMP_LIMIT, Gate
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

_FEW_PAIRS = 4096
_BLOCK = 256  # pairs per program, of many


class ExpertTiles(NamedTuple):
    order: torch.Tensor  # [pairs] pairs sorted by expert, stable
    table: torch.Tensor  # [3, max tiles] expert (-1: no tile), first index in `order`, end of the expert's range
    size: int  # pairs per tile
    positions: torch.Tensor | None = None  # [pairs] index of each pair in a padded `order`


def sort_by_expert(ids: torch.Tensor, num_experts: int, size: int, padded: bool = False) -> ExpertTiles:
    """The tiles of ids [tokens, top_k]. The table size follows from shapes only. `padded`: tile t has the indices
    from t * size on, and indices without a pair have no values."""
    num_pairs = ids.numel()
    max_tiles = triton.cdiv(num_pairs, size) + min(num_experts, num_pairs)
    order = torch.empty(max_tiles * size if padded else num_pairs, dtype=torch.int32, device=ids.device)
    table = torch.empty(3, max_tiles, dtype=torch.int32, device=ids.device)
    positions = torch.empty(num_pairs, dtype=torch.int32, device=ids.device) if padded else None
    tiles = ExpertTiles(order, table, size, positions)
    if num_pairs > _FEW_PAIRS:
        _sort_many(ids, num_experts, tiles)
        return tiles
    _sort_kernel[(num_experts,)](
        ids,
        order,
        positions,
        table,
        num_pairs,
        max_tiles,
        num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        SIZE=size,
        BLOCK=max(triton.next_power_of_2(num_pairs), 32),
        num_warps=4 if num_pairs <= 1024 else 8,
        **dependent(ids.device, len(ids)),
    )
    return tiles


def _sort_many(ids: torch.Tensor, num_experts: int, tiles: ExpertTiles) -> None:
    num_pairs = ids.numel()
    num_blocks = triton.cdiv(num_pairs, _BLOCK)
    bins = triton.next_power_of_2(num_experts + 1)  # with one for pairs of no expert
    counts = torch.empty(bins, num_blocks, dtype=torch.int32, device=ids.device)
    totals = torch.zeros(bins, dtype=torch.int32, device=ids.device)
    _count_kernel[(num_blocks,)](
        ids, counts, totals, num_pairs, num_blocks, num_experts, BINS=bins, BLOCK=_BLOCK, num_warps=4
    )
    _offset_kernel[(num_experts,)](
        counts,
        totals,
        tiles.table,
        num_blocks,
        tiles.table.shape[1],
        num_experts,
        BINS=bins,
        SIZE=tiles.size,
        PADDED=tiles.positions is not None,
        BLOCKS=min(1024, max(triton.next_power_of_2(num_blocks), 32)),
        num_warps=4,
    )
    _scatter_kernel[(num_blocks,)](
        ids, counts, tiles.order, tiles.positions, num_pairs, num_blocks, num_experts, BLOCK=_BLOCK, num_warps=8
    )


# grid: (experts,): each program finds the pairs of its own expert
@triton.jit
def _sort_kernel(
    ids,
    order,
    positions,
    table,
    num_pairs,
    max_tiles,
    num_experts,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    expert = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    wait_for_previous(DEPENDENT)
    found = tl.load(ids + pair, mask=pair < num_pairs, other=num_experts)  # lanes past the end have a bin
    counts = tl.histogram(found, BINS).to(tl.int32)
    start, count, tile = _range_of(expert, counts, BINS, SIZE, positions is not None)
    mine = found == expert
    index = start + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(order + index, pair, mask=mine)
    if positions is not None:
        tl.store(positions + pair, index, mask=mine)
    _list_tiles(table, expert, start, count, tile, max_tiles, num_experts, SIZE)


# grid: (blocks of pairs,)
@triton.jit
def _count_kernel(ids, counts, totals, num_pairs, num_blocks, num_experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    found = tl.histogram(tl.load(ids + pair, mask=pair < num_pairs, other=num_experts), BINS).to(tl.int32)
    tl.store(counts + bins * num_blocks + block, found)
    tl.atomic_add(totals + bins, found, sem="relaxed")


# grid: (experts,): turns the counts of an expert's row into offsets in `order`
@triton.jit
def _offset_kernel(
    counts,
    totals,
    table,
    num_blocks,
    max_tiles,
    num_experts,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    expert = tl.program_id(0)
    start, count, tile = _range_of(expert, tl.load(totals + tl.arange(0, BINS)), BINS, SIZE, PADDED)
    offset = start
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        own = tl.load(counts + expert * num_blocks + block, mask=block < num_blocks, other=0)
        tl.store(counts + expert * num_blocks + block, offset + tl.cumsum(own, 0) - own, mask=block < num_blocks)
        offset += tl.sum(own, 0)
    _list_tiles(table, expert, start, count, tile, max_tiles, num_experts, SIZE)


# grid: (blocks of pairs,): `offsets` are those of each expert's first pair in the block
@triton.jit
def _scatter_kernel(ids, offsets, order, positions, num_pairs, num_blocks, num_experts, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    pair = block * BLOCK + lane
    found = tl.load(ids + pair, mask=pair < num_pairs, other=num_experts)
    mine = found < num_experts
    # the same load, so that it has the layout of the other axis
    other = tl.load(ids + pair, mask=pair < num_pairs, other=num_experts)
    before = (found[:, None] == other[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    offset = tl.load(offsets + found * num_blocks + block, mask=mine, other=0)
    tl.store(order + offset + rank, pair, mask=mine)
    if positions is not None:
        tl.store(positions + pair, offset + rank, mask=mine)


@triton.jit
def _range_of(expert, counts, BINS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Offset of the first pair, number of pairs and first tile of an expert, from the counts of all."""
    bins = tl.arange(0, BINS)
    tiles = (counts + SIZE - 1) // SIZE
    tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    start = tile * SIZE if PADDED else tl.sum(tl.where(bins < expert, counts, 0), 0)
    return start, tl.sum(tl.where(bins == expert, counts, 0), 0), tile


@triton.jit
def _list_tiles(table, expert, start, count, tile, max_tiles, num_experts, SIZE: tl.constexpr):
    """Lists the expert's tiles; the last expert's program marks the unused ones."""
    for first in range(0, count, SIZE):
        tl.store(table + tile, expert)
        tl.store(table + max_tiles + tile, start + first)
        tl.store(table + 2 * max_tiles + tile, start + count)
        tile += 1
    if expert == num_experts - 1:
        for unused in range(tile, max_tiles):
            tl.store(table + unused, -1)


# Shared by the grouped GEMM kernels: the pairs of a tile, and the epilogue (bias, gate, weights of pairs, store).

GATES: tuple[Gate, ...] = ("silu", "gelu_tanh", "clamped_swiglu", "relu2")  # kernels use the index
ALPHA, LIMIT = tl.constexpr(CLAMP_ALPHA), tl.constexpr(CLAMP_LIMIT)


@triton.jit
def pairs_of(tile, order, table, num_tiles, PAIRS: tl.constexpr):
    """Sorted indices of a tile's pairs, whether each exists, and the pairs. `order` None: one token, whose pairs are
    not sorted. A tile below 0 has none."""
    if order is None:
        index = tile + tl.arange(0, PAIRS)
        return index, index == tile, index
    else:
        is_listed = tile >= 0
        index = tl.load(table + num_tiles + tile, mask=is_listed, other=0) + tl.arange(0, PAIRS)
        there = index < tl.load(table + 2 * num_tiles + tile, mask=is_listed, other=0)
        return index, there, tl.load(order + index, mask=there, other=0)


@triton.jit
def store_pairs(
    sums,  # [PAIRS, OUTPUTS] float32, and the same of up rows
    pairs,  # as `pairs_of` returns them
    output,
    expert,
    bias,
    weights,  # of pairs, and of how many; of further pairs the weight is 1, None: there are none
    out,
    num_out,
    INWARD: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
):
    """The epilogue. INWARD: gate and up into sorted rows; else down into pairs, times their weights."""
    total, ups = sums
    index, there, pair = pairs
    pair_weights, num_weighted = weights
    inside = output < num_out
    if bias is not None:
        biases = bias + expert.to(tl.int64) * (2 * num_out if GATED else num_out) + output
        total += tl.load(biases, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(biases + num_out, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # rounded as the output of a separate GEMM would be
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        up = ups.to(out.dtype.element_ty).to(tl.float32)
        if GATE == 2:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            gate = gate * tl.sigmoid(gate * ALPHA)
        elif GATE == 1:
            # 0.5 * (1 + tanh(y)) is sigmoid(2 y)
            gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        else:
            gate = gate * tl.sigmoid(gate)
        total = gate.to(out.dtype.element_ty).to(tl.float32) * up
        target = index
    elif INWARD:
        total = tl.maximum(total.to(out.dtype.element_ty).to(tl.float32), 0.0)
        total *= total
        target = index
    else:
        is_weighted = there
        if num_weighted is not None:
            is_weighted = there & (pair < num_weighted)
        total *= tl.load(pair_weights + pair, mask=is_weighted, other=1.0)[:, None]
        target = pair
    where = out + target.to(tl.int64)[:, None] * num_out + output[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


# Tile sizes of the grouped GEMMs.


class GroupedTile(NamedTuple):
    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int


BATCH_INVARIANT = GroupedTile(64, 64, 64, 4, 4)


def grouped_tile(each: float, inward: bool, itemsize: int = 2) -> GroupedTile:
    """The tile for a mean number of tokens per expert, measured on the H200 at the sizes of Qwen3-30B-A3B. Tiles of
    gate and up (`inward`) and of down have the same number of pairs."""
    if each <= 0.25:
        return GroupedTile(16, 32, 128, 2, 4) if inward else GroupedTile(16, 64, 256, 4, 3)
    if each <= 8:
        return GroupedTile(16, 64, 128, 4, 4)
    if each <= 32:
        return GroupedTile(32, 64, 128, 4, 3)
    if each <= 64:
        return GroupedTile(64, 64, 64, 4, 4)
    # gate and up have two accumulators; float32 needs twice the shared memory
    return GroupedTile(128, 128, 64, 8, 3) if inward or itemsize > 2 else GroupedTile(128, 256, 64, 8, 4)


def quantized_tile(each: float, is_inward: bool) -> GroupedTile:
    """As `grouped_tile`, for quantised weights; `inputs` counts bytes of a weight row. Not measured yet."""
    if each <= 8:
        return GroupedTile(16, 64 if is_inward else 128, 128, 4, 4)
    if each <= 32:
        return GroupedTile(32, 64, 128, 4, 3)
    if each <= 64:
        return GroupedTile(64, 64, 128, 4, 3)
    return GroupedTile(128, 128, 64, 8, 3)
