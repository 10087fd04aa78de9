"""Shared parts of prefill attention on Hopper: the tiles of a program, the producer warps, masks and weights."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.paged_attention.tile_list import RECORD
from slipstream.ops.paged_attention.triton.hopper import copy_block, find_starts
from slipstream.ops.paged_attention.triton.hopper_fp8 import copy_fp8_block, fp8_block_bytes

TILE = 128


def describe_queries(query: torch.Tensor, group: int) -> Any:
    """TMA descriptor for one head of the tokens of half a tile; None if the query heads of a KV head do not divide a
    tile, or its parts would be too small for a copy."""
    if group not in (1, 2, 4, 8):
        return None
    box = [TILE // 2 // group, query.shape[2]]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    return TensorDescriptor.from_tensor(query.flatten(1), box, layout)


@gluon.jit
def fetch_tiles(
    sources,
    asked,
    pages,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    COPIED: gl.constexpr,
):
    """A producer warp: loads keys or values of all tiles of this program, in order; one of the two also loads
    queries."""
    source, buffer, there, used, scale_source, scales = sources
    queries, q, q_there, q_used = asked
    table, table_stride, tile_records, totals = pages
    num_items = gl.load(totals + 1) * KV_HEADS
    num_turns = (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)
    done = 0
    for turn in range(num_turns):
        item = tile_of_turn(turn)
        if item < num_items:
            record = tile_records + (item // KV_HEADS).to(gl.int64) * RECORD
            pages_of_row = table + gl.load(record).to(gl.int64) * table_stride
            count, first, length, end = tile_extent(record, GROUP, TILE)
            if COPIED:
                TOKENS: gl.constexpr = TILE // 2 // GROUP
                token = gl.load(record + 1) + first // GROUP
                for half in gl.static_range(2):
                    mbarrier.wait(q_used.index(half), (turn & 1) ^ 1)
                    mbarrier.expect(q_there.index(half), TILE // 2 * DIM * 2)
                    for head in gl.static_range(GROUP):
                        origin = [token + half * TOKENS, (item % KV_HEADS * GROUP + head) * DIM]
                        part = q.index(half).slice(head * TOKENS, TOKENS)
                        tma.async_copy_global_to_shared(queries, origin, q_there.index(half), part)
            for start in range(first_seen(count, first, length, GROUP, BLOCK_N, WINDOW), end, BLOCK_N):
                stage = done % STAGES
                bar = there.index(stage)
                mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
                kv_head = item % KV_HEADS
                if scale_source is not None:
                    mbarrier.expect(bar, fp8_block_bytes(DIM, BLOCK_N, PAGE))
                    block = buffer.index(stage)
                    starts = find_starts(pages_of_row, start, length, BLOCK_N, PAGE)
                    first_scales = stage * (scales.shape[0] // STAGES)
                    copy_fp8_block(
                        source,
                        scale_source,
                        starts,
                        kv_head,
                        bar,
                        block,
                        scales,
                        first_scales,
                        KV_HEADS,
                        DIM,
                        BLOCK_N,
                        PAGE,
                    )
                else:
                    mbarrier.expect(bar, BLOCK_N * DIM * 2)
                    copy_block(
                        source, pages_of_row, start, length, kv_head, bar, buffer.index(stage), DIM, BLOCK_N, PAGE
                    )
                done += 1


@gluon.jit
def tile_lanes(first, row, GROUP: gl.constexpr, ROWS: gl.constexpr, COPIED: gl.constexpr):
    """Token and head of each row of half a tile; head by head if the queries are loaded by TMA."""
    if COPIED:
        TOKENS: gl.constexpr = ROWS // GROUP
        return first // GROUP + row % TOKENS, row // TOKENS
    else:
        return (first + row) // GROUP, (first + row) % GROUP


@gluon.jit
def hide_unseen(score, start, position, SCORES: gl.constexpr, WINDOW: gl.constexpr):
    BLOCK_N: gl.constexpr = score.shape[1]
    key = gl.expand_dims(start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES)), 0)
    visible = key <= gl.expand_dims(position, 1)
    if WINDOW:
        visible = visible & (key > gl.expand_dims(position - WINDOW, 1))
    return gl.where(visible, score, float("-inf"))


@gluon.jit
def weigh(score, top, total, factor, factors, WINDOW: gl.constexpr):
    """Weights of a block, with `factors` for scores [rows, keys] and `factor` for rows. Without a window the first key
    of the first block is visible to every query, so `top` is finite."""
    higher = gl.maximum(top, gl.max(score, 1) * factor)
    base = higher
    if WINDOW:
        base = gl.where(higher == float("-inf"), 0.0, higher)
    weight = gl.exp2(score * factors - gl.expand_dims(base, 1))
    fade = gl.exp2(top - base)
    return weight, higher, total * fade + gl.sum(weight, 1), fade


@gluon.jit
def tile_extent(record, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Tokens of the row, first query of the tile, keys of the row, keys visible to the tile (0 for padding)."""
    count = gl.load(record + 2)
    first = gl.load(record + 3)
    length = gl.load(record + 4)
    return count, first, length, gl.minimum(length, length - count + (first + TILE - 1) // GROUP + 1)


@gluon.jit
def first_seen(count, first, length, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """Start of the first block that a query of the tile sees."""
    if WINDOW:
        return gl.maximum(length - count + first // GROUP + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    else:
        return first * 0


@gluon.jit
def tile_of_turn(turn):
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    return turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)
