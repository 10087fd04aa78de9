"""Prefill and mixed steps on Hopper: two producer warps, two consumer warpgroups.

The same tiles and sums as in `varlen.py`. One warp loads keys and one loads values, and the queries of the next
tile as soon as those of the previous one are free. Each warpgroup computes half of a tile: it scores one block of keys
while the MMAs with the values of the previous block are in flight.

Keys of an FP8 cache are multiplied as they lie, by two FP8 matrices whose sum is the queries: together they take the
time of a 16-bit MMA. MMAs of FP8 sum along rows only, and values are summed over keys, so each warpgroup widens half of
the values of a block to bfloat16 while the MMAs before it are in flight.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.attention.cache import FP8
from slipstream.ops.attention.hopper import (
    HALF_RANGE,
    MIN_SCALES,
    clear_past_end,
    copy_block,
    copy_fp8_block,
    describe,
    describe_numbers,
    describe_scales,
    find_starts,
    fp8_block_bytes,
    load_column_scales,
    plain_scales,
    split_queries,
    widen_block,
)
from slipstream.ops.attention.launch import LOG2E, head_shape, launch_strides
from slipstream.ops.attention.tile_list import RECORD, TileList
from slipstream.ops.platform.pdl import make_barriers

BLOCK_KEYS, WIDE_BLOCK_KEYS = 128, 64  # heads of 256 have twice the sums
STAGES = 2
# One program per multiprocessor. An even split of the registers gives 168 per thread; producer warps give most of
# theirs to the consumers.
EVEN_REGISTERS = 168
COMPUTE_REGISTERS, FP8_COMPUTE_REGISTERS = gl.constexpr(240), gl.constexpr(232)
FETCH_REGISTERS, FP8_FETCH_REGISTERS = gl.constexpr(24), gl.constexpr(40)


def attend_tiles(
    out: torch.Tensor,  # [T, heads, dim]
    query: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    page_table: torch.Tensor,  # [B, width] int64
    tile_list: TileList,  # built with tiles of TILE
    scale: float,
    num_programs: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,  # [heads]
) -> None:
    block = BLOCK_KEYS if query.shape[2] <= 128 else WIDE_BLOCK_KEYS
    is_fp8 = keys.dtype is FP8
    numbers = describe_numbers if is_fp8 else describe
    _tile_kernel[(num_programs,)](
        out,
        query,
        describe_queries(query, query.shape[1] // keys.shape[2]),
        numbers(keys, block),
        numbers(values, block),
        describe_scales(keys, block) if is_fp8 else None,
        describe_scales(values, block) if is_fp8 else None,
        page_table,
        tile_list.tiles,
        tile_list.totals,
        sinks,
        scale,
        *launch_strides(out, query, page_table),
        TILE=TILE,
        BLOCK_N=block,
        STAGES=STAGES,
        WINDOW=window,
        num_warps=4,
        maxnreg=EVEN_REGISTERS,
        **head_shape(out, keys),
    )


# grid: (SMs,) over (tile, kv head); every second round is reversed, so that no program always gets the longer tiles
@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table"])
def _tile_kernel(
    out,
    query,
    queries,
    keys,
    values,
    key_scales,  # descriptors; None unless keys and values are FP8
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
    IS_FP8: gl.constexpr = key_scales is not None
    STORED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], keys.dtype)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE // 2, DIM], DTYPE)
    q = gl.allocate_shared_memory(DTYPE, [2, TILE // 2, DIM], QUERIES)
    split, k_scales, v_scales, wide, wide_there, wide_used = None, None, None, None, None, None
    if IS_FP8:  # the numbers that add up to the queries: high and low of each half
        split = gl.allocate_shared_memory(keys.dtype, [4, TILE // 2, DIM], STORED)
    k = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_N, DIM], STORED)
    v = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_N, DIM], STORED)
    if IS_FP8:
        WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], gl.bfloat16)
        wide = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, DIM], WIDE)
        PARTS: gl.constexpr = BLOCK_N // (BLOCK_N if PAGE > BLOCK_N else PAGE)
        ROWS: gl.constexpr = [STAGES * PARTS, 1, max(MIN_SCALES, BLOCK_N // PARTS)]
        k_scales = gl.allocate_shared_memory(gl.float32, ROWS, gl.NVMMASharedLayout(0, 32, 2))
        v_scales = gl.allocate_shared_memory(gl.float32, ROWS, gl.NVMMASharedLayout(0, 32, 2))
    k_there, v_there = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    if IS_FP8:
        wide_there = make_barriers(STAGES, 2)
    k_used, v_used = make_barriers(STAGES, 2), make_barriers(STAGES, 2)
    if IS_FP8:
        wide_used = make_barriers(STAGES, 2)
    q_there, q_used = make_barriers(2, 1), make_barriers(2, 1)
    fence_async_shared()
    COPIED: gl.constexpr = queries is not None  # else the consumers load them
    tensors = (out, query, tile_records, totals, sinks, scale, query_token, query_head, out_token, out_head)
    asked = (queries, q, q_there, q_used, split)
    stored = ((k, k_there, k_used, k_scales), (v, v_there, v_used, v_scales), (wide, wide_there, wide_used))
    pages = (table, table_stride, tile_records, totals)
    of_keys = (keys, k, k_there, k_used, key_scales, k_scales)
    of_values = (values, v, v_there, v_used, value_scales, v_scales)
    COMPUTE: gl.constexpr = FP8_COMPUTE_REGISTERS if IS_FP8 else COMPUTE_REGISTERS
    FETCH: gl.constexpr = FP8_FETCH_REGISTERS if IS_FP8 else FETCH_REGISTERS
    gl.warp_specialize(
        [
            (_compute, (tensors, asked, stored, 0, KV_HEADS, GROUP, DIM, TILE, BLOCK_N, PAGE, STAGES, WINDOW, COPIED)),
            (_compute, (tensors, asked, stored, 1, KV_HEADS, GROUP, DIM, TILE, BLOCK_N, PAGE, STAGES, WINDOW, COPIED)),
            (_fetch, (of_keys, asked, pages, KV_HEADS, GROUP, DIM, TILE, BLOCK_N, PAGE, STAGES, WINDOW, False)),
            (_fetch, (of_values, asked, pages, KV_HEADS, GROUP, DIM, TILE, BLOCK_N, PAGE, STAGES, WINDOW, COPIED)),
        ],
        [4, 1, 1],
        [COMPUTE, FETCH, FETCH],
    )


@gluon.jit
def _compute(
    tensors,
    asked,
    stored,
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
    _, q_halves, q_there, q_used, split = asked
    keys, values, wide = stored
    k, k_there, k_used, k_scales = keys
    v, v_there, v_used, v_scales = values
    DTYPE: gl.constexpr = query.dtype.element_ty
    IS_FP8: gl.constexpr = split is not None
    ROWS: gl.constexpr = TILE // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32 if IS_FP8 else 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    if IS_FP8:
        keys = (k, k_there, k_used, plain_scales(k_scales, STAGES))
        values = (v, v_there, v_used, plain_scales(v_scales, STAGES))
        high, low = split.index(2 * HALF), split.index(2 * HALF + 1)
        # what the weights are multiplied with
        v, v_there, v_used = wide
    else:
        high, low = q_halves.index(HALF), None
        factor = scale * LOG2E
        factors = factor
    blocks = (high, low, k, k_there)
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, BY_ROW)), 0)
    num_items = gl.load(totals + 1) * KV_HEADS
    num_turns = (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)
    done = 0
    for turn in range(num_turns):
        item = _tile_of_turn(turn)
        if item < num_items:
            record = tile_records + (item // KV_HEADS).to(gl.int64) * RECORD
            begin = gl.load(record + 1).to(gl.int64)
            count, first, length, end = _tile_extent(record, GROUP, TILE)
            before = length - count
            token, head = _tile_lanes(
                first + HALF * ROWS, gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROW)), GROUP, ROWS, COPIED
            )
            head += item % KV_HEADS * GROUP
            mask = gl.expand_dims(token < count, 1)
            if COPIED:
                mbarrier.wait(q_there.index(HALF), turn & 1)
                if IS_FP8:
                    q = q_halves.index(HALF).load(BY_ROW)
                    mbarrier.arrive(q_used.index(HALF), count=1)
            else:
                where = gl.expand_dims((begin + token) * query_token + head * query_head, 1) + dim
                q = gl.load(query + where, mask=mask, other=0.0)
                if not IS_FP8:
                    high.store(q)
                    fence_async_shared()
            if IS_FP8:
                q_high, q_low, unit = split_queries(q)
                gl.thread_barrier()  # all warps have finished with the queries of the previous tile
                high.store(q_high)
                low.store(q_low)
                fence_async_shared()
                gl.thread_barrier()
                factor = gl.convert_layout(unit, gl.SliceLayout(1, SCORES)) * (scale * LOG2E)
                factors = gl.expand_dims(factor, 1)

            own, own_head = _tile_lanes(
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
                if IS_FP8:
                    start = _first_seen(count, first, length, GROUP, BLOCK_N, WINDOW)
                score = _score(blocks, done, SCORES, STAGES)
                if IS_FP8:
                    widen_block(values, wide, start, length, done, HALF, DIM, BLOCK_N, PAGE, STAGES)
                score = warpgroup_mma_wait(0, deps=(score,))
                score = _scale_scores(score, keys, done, SCORES, BLOCK_N, PAGE, STAGES)
                if not IS_FP8:  # not before the wait, where kernels were measured
                    start = _first_seen(count, first, length, GROUP, BLOCK_N, WINDOW)
                score = _hide_unseen(score, start, position, SCORES, WINDOW)
                weight, top, total, fade = _weigh(score, top, total, factor, factors, WINDOW)
                weight = gl.convert_layout(weight.to(v.dtype), WEIGHTS)
                done += 1
                # keys visible to every query of the tile need no mask
                masked = gl.maximum((before + first // GROUP + 1) // BLOCK_N, 1) * BLOCK_N
                for next_start in range(start + BLOCK_N, end, BLOCK_N):
                    score = _score(blocks, done, SCORES, STAGES)
                    last = (done - 1) % STAGES
                    phase = (done - 1) // STAGES & 1
                    mbarrier.wait(v_there.index(last), phase)
                    acc = warpgroup_mma(weight, v.index(last), acc, is_async=True)
                    if IS_FP8:
                        widen_block(values, wide, next_start, length, done, HALF, DIM, BLOCK_N, PAGE, STAGES)
                    score = warpgroup_mma_wait(1, deps=(score,))
                    score = _scale_scores(score, keys, done, SCORES, BLOCK_N, PAGE, STAGES)
                    if WINDOW:  # noqa: SIM114 - known when compiled
                        score = _hide_unseen(score, next_start, position, SCORES, WINDOW)
                    elif next_start >= masked:
                        score = _hide_unseen(score, next_start, position, SCORES, WINDOW)
                    next_weight, top, total, fade = _weigh(score, top, total, factor, factors, WINDOW)
                    # already complete: the branch keeps the assembler from moving the exponentials behind the wait
                    mbarrier.wait(v_there.index(last), phase)
                    acc, next_weight = warpgroup_mma_wait(0, deps=(acc, next_weight))
                    mbarrier.arrive(v_used.index(last), count=1)
                    acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, SUMS)), 1)
                    weight = gl.convert_layout(next_weight.to(v.dtype), WEIGHTS)
                    done += 1
                if COPIED and not IS_FP8:
                    mbarrier.arrive(q_used.index(HALF), count=1)
                last = (done - 1) % STAGES
                mbarrier.wait(v_there.index(last), (done - 1) // STAGES & 1)
                if not IS_FP8:  # else `widen_block` has done so
                    stop = (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N
                    if stop > length:
                        clear_past_end(v.index(last), length - (stop - BLOCK_N), BY_ROW, BLOCK_N)
                acc = warpgroup_mma(weight, v.index(last), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_used.index(last), count=1)
            elif COPIED and not IS_FP8:
                mbarrier.arrive(q_used.index(HALF), count=1)
            total = gl.where(total > 0, total, 1.0)
            if IS_FP8:
                total *= 1 / HALF_RANGE
            total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
            result = gl.convert_layout((acc / gl.expand_dims(total, 1)).to(DTYPE), BY_ROW)
            where = gl.expand_dims((begin + token) * out_token + head * out_head, 1) + dim
            gl.store(out + where, result, mask=mask)


@gluon.jit
def _scale_scores(
    score, keys, done, SCORES: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr
):
    """The scores of block `done`, times the scales of its keys; the keys are free afterwards."""
    _, _, k_used, scales = keys
    if scales is not None:
        factors = load_column_scales(scales, done % STAGES, SCORES, BLOCK_N, PAGE)
    mbarrier.arrive(k_used.index(done % STAGES), count=1)
    return score if scales is None else score * gl.expand_dims(factors, 0)


@gluon.jit
def _score(blocks, done, SCORES: gl.constexpr, STAGES: gl.constexpr):
    """Starts the MMAs of the queries with the keys of block `done`."""
    high, low, k, k_there = blocks
    stage = done % STAGES
    mbarrier.wait(k_there.index(stage), done // STAGES & 1)
    ROWS: gl.constexpr = high.shape[0]
    BLOCK_N: gl.constexpr = k.shape[1]
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    keys = k.index(stage).permute((1, 0))
    score = warpgroup_mma(high, keys, nothing, use_acc=False, is_async=True)
    if low is not None:
        score = warpgroup_mma(low, keys, score, is_async=True)
    return score


# The tiles of a program, the producer warps, masks and weights.

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
def _fetch(
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
    queries, q, q_there, q_used, _ = asked
    table, table_stride, tile_records, totals = pages
    num_items = gl.load(totals + 1) * KV_HEADS
    num_turns = (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)
    done = 0
    for turn in range(num_turns):
        item = _tile_of_turn(turn)
        if item < num_items:
            record = tile_records + (item // KV_HEADS).to(gl.int64) * RECORD
            pages_of_row = table + gl.load(record).to(gl.int64) * table_stride
            count, first, length, end = _tile_extent(record, GROUP, TILE)
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
            for start in range(_first_seen(count, first, length, GROUP, BLOCK_N, WINDOW), end, BLOCK_N):
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
def _tile_lanes(first, row, GROUP: gl.constexpr, ROWS: gl.constexpr, COPIED: gl.constexpr):
    """Token and head of each row of half a tile; head by head if the queries are loaded by TMA."""
    if COPIED:
        TOKENS: gl.constexpr = ROWS // GROUP
        return first // GROUP + row % TOKENS, row // TOKENS
    else:
        return (first + row) // GROUP, (first + row) % GROUP


@gluon.jit
def _hide_unseen(score, start, position, SCORES: gl.constexpr, WINDOW: gl.constexpr):
    BLOCK_N: gl.constexpr = score.shape[1]
    key = gl.expand_dims(start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES)), 0)
    visible = key <= gl.expand_dims(position, 1)
    if WINDOW:
        visible = visible & (key > gl.expand_dims(position - WINDOW, 1))
    return gl.where(visible, score, float("-inf"))


@gluon.jit
def _weigh(score, top, total, factor, factors, WINDOW: gl.constexpr):
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
def _tile_extent(record, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Tokens of the row, first query of the tile, keys of the row, keys visible to the tile (0 for padding)."""
    count = gl.load(record + 2)
    first = gl.load(record + 3)
    length = gl.load(record + 4)
    return count, first, length, gl.minimum(length, length - count + (first + TILE - 1) // GROUP + 1)


@gluon.jit
def _first_seen(count, first, length, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """Start of the first block that a query of the tile sees."""
    if WINDOW:
        return gl.maximum(length - count + first // GROUP + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    else:
        return first * 0


@gluon.jit
def _tile_of_turn(turn):
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    return turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)
