"""Prefill and mixed steps on Hopper over an FP8 cache.

As `hopper_varlen.py`, with two differences. Keys are multiplied as they lie, by two FP8 matrices whose sum is the
queries: together they take the time of a 16-bit MMA. MMAs of FP8 sum along rows only, and values are summed over keys,
so each warpgroup widens half of the values of a block to bfloat16 while the MMAs before it are in flight.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from slipstream.ops.attention.hopper import (
    HALF_RANGE,
    MIN_SCALES,
    describe_numbers,
    describe_scales,
    scale_layout,
    split_queries,
    widen_scaled,
)
from slipstream.ops.attention.hopper_varlen import (
    EVEN_REGISTERS,
    STAGES,
    TILE,
    describe_queries,
    fetch_tiles,
    first_seen,
    hide_unseen,
    tile_extent,
    tile_lanes,
    tile_of_turn,
    weigh,
)
from slipstream.ops.attention.launch import LOG2E, head_shape, launch_strides
from slipstream.ops.attention.tile_list import RECORD, TileList
from slipstream.ops.platform.pdl import make_barriers

BLOCK_KEYS = 128
COMPUTE_REGISTERS = gl.constexpr(232)
FETCH_REGISTERS = gl.constexpr(40)


def attend_tiles(
    out: torch.Tensor,  # [T, heads, dim]
    query: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim] FP8
    values: torch.Tensor,
    page_table: torch.Tensor,  # [B, width] int64
    tile_list: TileList,  # built with tiles of TILE
    scale: float,
    num_programs: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,  # [heads]
) -> None:
    _tile_kernel[(num_programs,)](
        out,
        query,
        describe_queries(query, query.shape[1] // keys.shape[2]),
        describe_numbers(keys, BLOCK_KEYS),
        describe_numbers(values, BLOCK_KEYS),
        describe_scales(keys, BLOCK_KEYS),
        describe_scales(values, BLOCK_KEYS),
        page_table,
        tile_list.tiles,
        tile_list.totals,
        sinks,
        scale,
        *launch_strides(out, query, page_table),
        TILE=TILE,
        BLOCK_N=BLOCK_KEYS,
        STAGES=STAGES,
        WINDOW=window,
        num_warps=4,
        maxnreg=EVEN_REGISTERS,
        **head_shape(out, keys),
    )


# grid: (SMs,) over (tile, kv head), as in `hopper_varlen.py`
@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table"])
def _tile_kernel(
    out,
    query,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    tile_records,
    totals,
    sinks,
    scale,
    table_stride,
    query_token,
    query_head,
    out_token,
    out_head,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):
    DTYPE: gl.constexpr = query.dtype.element_ty
    STORED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], keys.dtype)
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], gl.bfloat16)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE // 2, DIM], DTYPE)
    q = gl.allocate_shared_memory(DTYPE, [2, TILE // 2, DIM], QUERIES)
    # the numbers that add up to the queries: high and low of each half
    split = gl.allocate_shared_memory(keys.dtype, [4, TILE // 2, DIM], STORED)
    k = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_N, DIM], STORED)
    v = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_N, DIM], STORED)
    wide = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, DIM], WIDE)
    PARTS: gl.constexpr = BLOCK_N // (BLOCK_N if PAGE > BLOCK_N else PAGE)
    WIDTH: gl.constexpr = max(MIN_SCALES, BLOCK_N // PARTS)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    k_scales = gl.allocate_shared_memory(gl.float32, [STAGES * PARTS, 1, WIDTH], ROWS)
    v_scales = gl.allocate_shared_memory(gl.float32, [STAGES * PARTS, 1, WIDTH], ROWS)
    k_there, v_there, wide_there = make_barriers(STAGES, 1), make_barriers(STAGES, 1), make_barriers(2, 2)
    k_used, v_used, wide_used = make_barriers(STAGES, 2), make_barriers(STAGES, 2), make_barriers(2, 2)
    q_there, q_used = make_barriers(2, 1), make_barriers(2, 1)
    fence_async_shared()
    COPIED: gl.constexpr = queries is not None  # else the consumers load them
    tensors = (out, query, tile_records, totals, sinks, scale, query_token, query_head, out_token, out_head)
    pages = (table, table_stride, tile_records, totals)
    asked = (queries, q, q_there, q_used)
    of_keys = (keys, k, k_there, k_used, key_scales, k_scales)
    of_values = (values, v, v_there, v_used, value_scales, v_scales)
    shared = (q, q_there, q_used, split, k, k_there, k_used, k_scales, v, v_there, v_used, v_scales)
    both = (wide, wide_there, wide_used)
    gl.warp_specialize(
        [
            (_compute, (tensors, shared, both, 0, KV_HEADS, GROUP, DIM, TILE, BLOCK_N, PAGE, STAGES, WINDOW, COPIED)),
            (_compute, (tensors, shared, both, 1, KV_HEADS, GROUP, DIM, TILE, BLOCK_N, PAGE, STAGES, WINDOW, COPIED)),
            (fetch_tiles, (of_keys, asked, pages, KV_HEADS, GROUP, DIM, TILE, BLOCK_N, PAGE, STAGES, WINDOW, False)),
            (fetch_tiles, (of_values, asked, pages, KV_HEADS, GROUP, DIM, TILE, BLOCK_N, PAGE, STAGES, WINDOW, COPIED)),
        ],
        [4, 1, 1],
        [COMPUTE_REGISTERS, FETCH_REGISTERS, FETCH_REGISTERS],
    )


@gluon.jit
def _compute(
    tensors,
    shared,
    both,
    HALF: gl.constexpr,
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
    """A consumer warpgroup: one half of each tile of this program."""
    out, query, tile_records, totals, sinks, scale, query_token, query_head, out_token, out_head = tensors
    q_halves, q_there, q_used, split, k, k_there, k_used, k_scales, v, v_there, v_used, v_scales = shared
    wide, wide_there, wide_used = both
    DTYPE: gl.constexpr = query.dtype.element_ty
    ROWS: gl.constexpr = TILE // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    PARTS: gl.constexpr = [STAGES, k_scales.shape[0] // STAGES, k_scales.shape[2]]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    k_scales = k_scales._reinterpret(gl.float32, PARTS, PLAIN)
    v_scales = v_scales._reinterpret(gl.float32, PARTS, PLAIN)
    high, low = split.index(2 * HALF), split.index(2 * HALF + 1)
    blocks = (high, low, k, k_there, k_used, k_scales)
    values = (v, v_there, v_used, v_scales, wide, wide_there, wide_used)
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, BY_ROW)), 0)
    num_items = gl.load(totals + 1) * KV_HEADS
    num_turns = (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)
    done = 0
    for turn in range(num_turns):
        item = tile_of_turn(turn)
        if item < num_items:
            record = tile_records + (item // KV_HEADS).to(gl.int64) * RECORD
            begin = gl.load(record + 1).to(gl.int64)
            count, first, length, end = tile_extent(record, GROUP, TILE)
            before = length - count
            token, head = tile_lanes(
                first + HALF * ROWS, gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROW)), GROUP, ROWS, COPIED
            )
            head += item % KV_HEADS * GROUP
            mask = gl.expand_dims(token < count, 1)
            if COPIED:
                mbarrier.wait(q_there.index(HALF), turn & 1)
                q = q_halves.index(HALF).load(BY_ROW)
                mbarrier.arrive(q_used.index(HALF), count=1)
            else:
                where = gl.expand_dims((begin + token) * query_token + head * query_head, 1) + dim
                q = gl.load(query + where, mask=mask, other=0.0)
            q_high, q_low, unit = split_queries(q)
            gl.thread_barrier()  # all warps have finished with the queries of the previous tile
            high.store(q_high)
            low.store(q_low)
            fence_async_shared()
            gl.thread_barrier()
            factor = gl.convert_layout(unit, gl.SliceLayout(1, SCORES)) * (scale * LOG2E)
            factors = gl.expand_dims(factor, 1)

            own, own_head = tile_lanes(
                first + HALF * ROWS, gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), GROUP, ROWS, COPIED
            )
            position = before + gl.minimum(own, count - 1)
            top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            if sinks is not None:
                # sums begin with the sink, which has no value
                top = gl.load(sinks + item % KV_HEADS * GROUP + own_head).to(gl.float32) * LOG2E
                total += 1.0
            acc = gl.zeros([ROWS, DIM], gl.float32, SUMS)
            if end > 0:
                start = first_seen(count, first, length, GROUP, BLOCK_N, WINDOW)
                score = _score(blocks, done, SCORES, STAGES)
                _widen(values, start, length, done, HALF, DIM, BLOCK_N, PAGE, STAGES)
                score = warpgroup_mma_wait(0, deps=(score,))
                score = _scale_scores(score, blocks, done, SCORES, BLOCK_N, PAGE, STAGES)
                score = hide_unseen(score, start, position, SCORES, WINDOW)
                weight, top, total, fade = weigh(score, top, total, factor, factors, WINDOW)
                weight = gl.convert_layout(weight.to(gl.bfloat16), WEIGHTS)
                done += 1
                # keys visible to every query of the tile need no mask
                masked = gl.maximum((before + first // GROUP + 1) // BLOCK_N, 1) * BLOCK_N
                for next_start in range(start + BLOCK_N, end, BLOCK_N):
                    score = _score(blocks, done, SCORES, STAGES)
                    last = (done - 1) % 2
                    mbarrier.wait(wide_there.index(last), (done - 1) // 2 & 1)
                    acc = warpgroup_mma(weight, wide.index(last), acc, is_async=True)
                    _widen(values, next_start, length, done, HALF, DIM, BLOCK_N, PAGE, STAGES)
                    score = warpgroup_mma_wait(1, deps=(score,))
                    score = _scale_scores(score, blocks, done, SCORES, BLOCK_N, PAGE, STAGES)
                    if WINDOW:  # noqa: SIM114 - known when compiled
                        score = hide_unseen(score, next_start, position, SCORES, WINDOW)
                    elif next_start >= masked:
                        score = hide_unseen(score, next_start, position, SCORES, WINDOW)
                    new_weight, top, total, fade = weigh(score, top, total, factor, factors, WINDOW)
                    # already complete: the branch keeps the assembler from moving the exponentials behind the wait
                    mbarrier.wait(wide_there.index(last), (done - 1) // 2 & 1)
                    acc, new_weight = warpgroup_mma_wait(0, deps=(acc, new_weight))
                    mbarrier.arrive(wide_used.index(last), count=1)
                    acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, SUMS)), 1)
                    weight = gl.convert_layout(new_weight.to(gl.bfloat16), WEIGHTS)
                    done += 1
                last = (done - 1) % 2
                mbarrier.wait(wide_there.index(last), (done - 1) // 2 & 1)
                acc = warpgroup_mma(weight, wide.index(last), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(wide_used.index(last), count=1)
            divisor = gl.where(total > 0, total, 1.0) * (1 / HALF_RANGE)
            divisor = gl.convert_layout(divisor, gl.SliceLayout(1, SUMS))
            result = gl.convert_layout((acc / gl.expand_dims(divisor, 1)).to(DTYPE), BY_ROW)
            where = gl.expand_dims((begin + token) * out_token + head * out_head, 1) + dim
            gl.store(out + where, result, mask=mask)


@gluon.jit
def _score(blocks, done, SCORES: gl.constexpr, STAGES: gl.constexpr):
    """Starts the MMAs of the queries with the keys of block `done`."""
    high, low, k, k_there, k_used, k_scales = blocks
    stage = done % STAGES
    mbarrier.wait(k_there.index(stage), done // STAGES & 1)
    ROWS: gl.constexpr = high.shape[0]
    BLOCK_N: gl.constexpr = k.shape[1]
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    keys = k.index(stage).permute((1, 0))
    score = warpgroup_mma(high, keys, nothing, use_acc=False, is_async=True)
    return warpgroup_mma(low, keys, score, is_async=True)


@gluon.jit
def _scale_scores(
    score, blocks, done, SCORES: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr
):
    """Scores times the scales of their keys; the stage of the keys is free afterwards."""
    high, low, k, k_there, k_used, k_scales = blocks
    stage = done % STAGES
    SIZE: gl.constexpr = BLOCK_N if PAGE > BLOCK_N else PAGE
    # columns of the MMA
    LAYOUT: gl.constexpr = scale_layout(SIZE, BLOCK_N, [1, 8, 16, 32, 64], [2, 4, 0, 0, 0], [0, 0])
    scales = gl.reshape(k_scales.index(stage).slice(0, SIZE, 1).load(LAYOUT), [BLOCK_N])
    scales = gl.convert_layout(scales, gl.SliceLayout(0, SCORES), assert_trivial=True)
    mbarrier.arrive(k_used.index(stage), count=1)
    return score * gl.expand_dims(scales, 0)


@gluon.jit
def _widen(
    values,
    start,
    length,
    done,
    HALF: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Half of the values of block `done` times their scales, and 2 ** -60, in bfloat16."""
    v, v_there, v_used, v_scales, wide, wide_there, wide_used = values
    KEYS: gl.constexpr = BLOCK_N // 2
    SIZE: gl.constexpr = KEYS if PAGE > KEYS else PAGE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [512 // DIM, DIM // 16], [4, 1], [1, 0])
    BITS: gl.constexpr = [[16, 32], [0, 0, 0, 1, 2], [4, 8]] if DIM == 128 else [[32], [0, 0, 1, 2, 4], [8, 16]]
    SCALES: gl.constexpr = scale_layout(SIZE, KEYS, BITS[0], BITS[1], BITS[2])
    stage, target = done % STAGES, done % 2
    mbarrier.wait(v_there.index(stage), done // STAGES & 1)
    numbers = v.index(stage).slice(HALF * KEYS, KEYS).load(LAYOUT).to(gl.uint8, bitcast=True)
    if PAGE > KEYS:
        loaded = v_scales.index(stage).slice(HALF * KEYS, KEYS, 1)
    else:
        loaded = v_scales.index(stage).slice(HALF * (KEYS // PAGE), KEYS // PAGE).slice(0, PAGE, 1)
    scales = gl.reshape(loaded.load(SCALES), [KEYS])
    scales = gl.convert_layout(scales, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    mbarrier.arrive(v_used.index(stage), count=1)
    key = start + HALF * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    # a page may hold old values, and their scales may be NaN
    scales = gl.where(key < length, scales * HALF_RANGE, 0.0).to(gl.bfloat16)
    found = widen_scaled(numbers, gl.expand_dims(scales, 1))
    mbarrier.wait(wide_used.index(target), (done // 2 & 1) ^ 1)
    wide.index(target).slice(HALF * KEYS, KEYS).store(found)
    fence_async_shared()
    mbarrier.arrive(wide_there.index(target), count=1)
