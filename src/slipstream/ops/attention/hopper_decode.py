"""Decode attention on Hopper: one producer warp loads keys and values, across splits and rows, and four warps compute.

Splits are those of `decode.py`. Memory is not idle between rows: while the sums of one row are stored and merged,
the keys of the next are in flight. Keys are the left operand of the MMAs, since tensor cores take 64 rows at a time and
a group has few query heads: padding would cost time and power. The producer warp runs `fetch_blocks`. Values of an
FP8 cache are widened to 16 bits in registers (`hopper.py`).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from slipstream.ops.attention.cache import FP8
from slipstream.ops.attention.hopper import (
    HALF_RANGE,
    MIN_SCALES,
    clear_past_end,
    copy_fp8_block,
    copy_parts,
    describe,
    describe_numbers,
    describe_scales,
    dims_of_rows,
    find_starts,
    fp8_block_bytes,
    join_splits,
    load_largest,
    load_scales,
    split_queries,
    store_largest,
    widen_values,
)
from slipstream.ops.attention.launch import LOG2E, head_shape, launch_strides, read_single, splits_of_program
from slipstream.ops.attention.single_list import SINGLE_RECORD
from slipstream.ops.attention.tile_list import TileList
from slipstream.ops.platform.pdl import dependent, make_barriers, release_next, wait_for_previous

# A block has a fixed cost, large or small, which matters most with few rows, or if each row and KV head has a program
# of its own: then blocks are larger and a multiprocessor runs one program. Otherwise it runs two, each with half the
# registers. Blocks of heads of 256 take all of the shared memory: one program, and small blocks. Blocks of FP8 have
# half of the bytes: three programs.
BLOCK_KEYS, FEW_BLOCK_KEYS = gl.constexpr(64), 128
EVEN_REGISTERS, FEW_EVEN_REGISTERS = 128, 168  # per thread
FETCH_REGISTERS, FEW_FETCH_REGISTERS = gl.constexpr(24), gl.constexpr(40)
LARGE_FP8_FETCH_REGISTERS = gl.constexpr(56)  # 128 keys and their scales
WIDE_HEAD = gl.constexpr(256)
FP8_PROGRAMS, FP8_REGISTERS, FP8_STAGES = 3, 80, 3


def programs_per_sm(head_dim: int, has_large_blocks: bool, is_fp8: bool = False) -> int:
    if has_large_blocks or head_dim >= WIDE_HEAD.value:
        return 1
    return FP8_PROGRAMS if is_fp8 else 2


def attend_splits(
    out: torch.Tensor,  # [T, heads, dim]
    query: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    page_table: torch.Tensor,  # [B, width] int64
    tile_list: TileList,
    sums: torch.Tensor,  # [splits, heads, dim] float32
    stats: torch.Tensor,  # [splits, heads, 2] float32
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,  # [heads]
) -> None:
    dim = query.shape[2]
    is_fp8 = keys.dtype is FP8
    is_alone = programs_per_sm(dim, tile_list.has_large_blocks, is_fp8) == 1
    block = FEW_BLOCK_KEYS if is_alone and dim < WIDE_HEAD.value else BLOCK_KEYS.value
    registers, stages = (FP8_REGISTERS, FP8_STAGES) if is_fp8 else (EVEN_REGISTERS, 3)
    if is_alone:
        registers, stages = FEW_EVEN_REGISTERS, 3 + is_fp8
    number = describe_numbers if is_fp8 else describe
    _split_kernel[((len(tile_list.shares) - 1) * keys.shape[2],)](
        out,
        query,
        number(keys, block),
        number(values, block),
        describe_scales(keys, block) if is_fp8 else None,
        describe_scales(values, block) if is_fp8 else None,
        page_table,
        tile_list.singles,
        tile_list.shares,
        tile_list.arrived,
        sums,
        stats,
        sinks,
        scale,
        *launch_strides(out, query, page_table),
        QUERIES=tile_list.max_queries,
        BLOCK_N=block,
        STAGES=stages if dim > 64 else 2 * stages,
        WINDOW=window,
        num_warps=4,
        maxnreg=registers,
        **head_shape(out, keys),
        **dependent(out.device, len(query)),
    )


# grid: (shares x kv heads,)
@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table"])
def _split_kernel(
    out,
    query,
    keys,
    values,
    key_scales,  # descriptors; None unless keys and values are FP8
    value_scales,
    table,
    singles,
    shares,
    arrived,
    sums,
    stats,
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
    QUERIES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    release_next(DEPENDENT)
    DTYPE: gl.constexpr = query.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], DTYPE)
    IS_FP8: gl.constexpr = key_scales is not None
    STORED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], keys.dtype)
    k = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_N, DIM], STORED)
    v = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_N, DIM], STORED)
    # the right operands of the MMAs
    LANES: gl.constexpr = max(8, triton.next_power_of_2(GROUP * QUERIES))
    scales = k
    if IS_FP8:
        PARTS: gl.constexpr = 2 * BLOCK_N // (BLOCK_N if PAGE > BLOCK_N else PAGE)
        WIDTH: gl.constexpr = max(MIN_SCALES, 2 * BLOCK_N // PARTS)
        scales = gl.allocate_shared_memory(gl.float32, [STAGES * PARTS, 1, WIDTH], gl.NVMMASharedLayout(0, 32, 2))
        high = gl.allocate_shared_memory(keys.dtype, [LANES, DIM], STORED)
        low = gl.allocate_shared_memory(keys.dtype, [LANES, DIM], STORED)
        weights = gl.allocate_shared_memory(gl.bfloat16, [LANES, BLOCK_N], SHARED)
        largest = gl.allocate_shared_memory(gl.float32, [4, LANES], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        own = (high, weights, low, largest)
    else:
        queries = gl.allocate_shared_memory(DTYPE, [LANES, DIM], SHARED)
        weights = gl.allocate_shared_memory(DTYPE, [LANES, BLOCK_N], SHARED)
        own = (queries, weights, queries, weights)
    blocks = (k, v, make_barriers(STAGES, 1), make_barriers(STAGES, 1), scales)
    fence_async_shared()
    tensors = (out, query, singles, shares, arrived, sums, stats, sinks, scale)
    strides = (query_token, query_head, out_token, out_head)
    sources = (keys, values, key_scales, value_scales, table, table_stride, singles, shares)
    FETCH: gl.constexpr = FETCH_REGISTERS if BLOCK_N == BLOCK_KEYS and DIM < WIDE_HEAD else FEW_FETCH_REGISTERS
    FP8_FETCH: gl.constexpr = FEW_FETCH_REGISTERS if BLOCK_N == BLOCK_KEYS else LARGE_FP8_FETCH_REGISTERS
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    tensors,
                    strides,
                    blocks,
                    own,
                    KV_HEADS,
                    GROUP,
                    DIM,
                    QUERIES,
                    BLOCK_N,
                    PAGE,
                    STAGES,
                    WINDOW,
                    DEPENDENT,
                ),
            ),
            (fetch_blocks, (sources, blocks, KV_HEADS, DIM, QUERIES, BLOCK_N, PAGE, STAGES, WINDOW, DEPENDENT)),
        ],
        [1],
        [FP8_FETCH if IS_FP8 else FETCH],
    )


@gluon.jit
def _compute(
    tensors,
    strides,
    blocks,
    own,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The consumer warps: the sums of this program's share, and the output of rows whose last split is in it."""
    out, query, singles, shares, arrived, sums, stats, sinks, scale = tensors
    query_token, query_head, out_token, out_head = strides
    k, v, there, used, scales = blocks
    queries, weights = own[0], own[1]
    DTYPE: gl.constexpr = query.dtype.element_ty
    IS_FP8: gl.constexpr = k.dtype == gl.float8e4nv
    if IS_FP8:
        SCALES: gl.constexpr = [2 * STAGES, scales.shape[0] // (2 * STAGES), scales.shape[2]]
        scales = scales._reinterpret(gl.float32, SCALES, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    LANES: gl.constexpr = queries.shape[0]
    # [keys or dimensions, heads]: a head of one query is a column
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 16])
    FP8_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 32])
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    factor = scale * LOG2E
    q_lane = gl.expand_dims(gl.arange(0, LANES, gl.SliceLayout(1, BY_ROW)), 1)
    q_dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, BY_ROW)), 0)
    lane = gl.arange(0, LANES, gl.SliceLayout(0, SUMS))
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(1, SUMS)), 1)
    if IS_FP8:
        dim = dims_of_rows(dim)
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    kv_head, first, first_split, last, last_split, end = splits_of_program(shares, KV_HEADS)
    query_index = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    done = 0
    wait_for_previous(DEPENDENT)
    for single in range(first, end):
        row, token, begin, size, num_splits, first_partial, length, count, split, stop = read_single(
            singles, single, first, first_split, last, last_split
        )
        if QUERIES == 1:
            count = 1
        is_query = lane < GROUP * count
        mask = gl.expand_dims(is_query, 0)
        # keys that each query sees
        seen = length - count + 1 + gl.minimum(query_index, count - 1)
        q_token, q_head = token + q_lane // GROUP, kv_head * GROUP + q_lane % GROUP
        q_offset = q_token * query_token + q_head * query_head + q_dim
        q = gl.load(query + q_offset, mask=(q_lane < GROUP * count) & (q_dim < DIM), other=0.0)
        gl.thread_barrier()  # all warps have finished with the queries of the previous row
        if IS_FP8:
            q_high, q_low, unit = split_queries(q)
            queries.store(q_high)
            own[2].store(q_low)
            factors = gl.expand_dims(gl.convert_layout(unit, gl.SliceLayout(0, SUMS)) * factor, 0)
        else:
            queries.store(q)
        fence_async_shared()
        gl.thread_barrier()
        for index in range(split, stop):
            # columns past the last query have weight 0
            top = gl.where(is_query, float("-inf"), 1e30)
            if sinks is not None:
                # the first split of a row counts the sink, which has no value
                sink = gl.load(sinks + head, mask=is_query, other=0.0).to(gl.float32) * LOG2E
                top = gl.where(is_query & (index == 0), sink, top)
            totals = gl.zeros([BLOCK_N, LANES], gl.float32, SUMS)
            acc = gl.zeros([DIM, LANES], gl.float32, SUMS)
            begin_keys = begin + index * size
            first_key = first_block(begin_keys, length, count, QUERIES, BLOCK_N, WINDOW)
            for start in range(first_key, gl.minimum(begin_keys + size, length), BLOCK_N):
                stage = done % STAGES
                mbarrier.wait(there.index(stage), done // STAGES & 1)
                if IS_FP8:
                    nothing = gl.zeros([BLOCK_N, LANES], gl.float32, FP8_SUMS)
                    score = warpgroup_mma(
                        k.index(stage), queries.permute((1, 0)), nothing, use_acc=False, is_async=True
                    )
                    score = warpgroup_mma(k.index(stage), own[2].permute((1, 0)), score, is_async=True)
                    left_v = widen_values(v.index(stage), gl.DotOperandLayout(0, SUMS, 2), DIM, BLOCK_N)
                    key_scale = load_scales(scales, 2 * stage, gl.SliceLayout(1, SUMS), BLOCK_N, PAGE)
                    value_scale = load_scales(scales, 2 * stage + 1, gl.SliceLayout(1, SUMS), BLOCK_N, PAGE)
                    value_scale = gl.where(start + key < length, value_scale * HALF_RANGE, 0.0)
                    score = warpgroup_mma_wait(0, deps=(score,))
                    score = gl.convert_layout(score, SUMS, assert_trivial=True) * gl.expand_dims(key_scale, 1)
                else:
                    left_v = v.index(stage).permute((1, 0))
                    nothing = gl.zeros([BLOCK_N, LANES], gl.float32, SUMS)
                    score = warpgroup_mma(
                        k.index(stage), queries.permute((1, 0)), nothing, use_acc=False, is_async=True
                    )
                    score = warpgroup_mma_wait(0, deps=(score,))
                    factors = factor
                visible = gl.expand_dims(start + key, 1) < gl.expand_dims(seen, 0)
                if WINDOW:
                    visible = visible & (gl.expand_dims(start + key, 1) >= gl.expand_dims(seen - WINDOW, 0))
                score = gl.where(visible, score * factors, float("-inf"))
                if IS_FP8:
                    store_largest(score, own[3])
                    # each warp has its keys and values in registers or multiplied before it stores
                    mbarrier.arrive(used.index(stage), count=1)
                    higher = gl.maximum(top, gl.convert_layout(load_largest(own[3]), gl.SliceLayout(0, SUMS)))
                else:
                    higher = gl.maximum(top, gl.max(score, 0))
                base = higher
                if QUERIES > 1:
                    # the first of several queries may see no key of the last blocks, the last one none of the first
                    base = gl.where(higher == float("-inf"), 0.0, higher)
                weight = gl.exp2(score - gl.expand_dims(base, 0))
                fade = gl.expand_dims(gl.exp2(top - base), 0)
                totals = totals * fade + weight
                top = higher
                acc = acc * fade
                if IS_FP8:
                    weight *= gl.expand_dims(value_scale, 1)
                weights.store(gl.permute(weight.to(weights.dtype), (1, 0)))
                fence_async_shared()
                if not IS_FP8:
                    if start + BLOCK_N > length:
                        clear_past_end(v.index(stage), length - start, BY_ROW, BLOCK_N)
                    gl.thread_barrier()
                acc = warpgroup_mma(left_v, weights.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                if not IS_FP8:
                    mbarrier.arrive(used.index(stage), count=1)
                done += 1

            if IS_FP8:
                acc *= HALF_RANGE
            total = gl.sum(totals, 0)
            if sinks is not None:
                total += gl.where(index == 0, gl.exp2(sink - top), 0.0)
            if num_splits == 1:
                result = acc / gl.expand_dims(gl.where(total > 0, total, 1.0), 0)
                where = out + gl.expand_dims((token + query_index) * out_token + head * out_head, 0) + dim
                gl.store(where, result.to(DTYPE), mask=mask)
            else:
                partial = (first_partial + query_index * num_splits + index) * (KV_HEADS * GROUP) + head
                gl.store(sums + gl.expand_dims(partial * DIM, 0) + dim, acc, mask=mask)
                gl.store(stats + partial * 2, top, mask=is_query)
                gl.store(stats + partial * 2 + 1, total, mask=is_query)
        if (num_splits > 1) & (split < stop):
            # all threads store their partial results before one increments the counter
            gl.thread_barrier()
            counter = arrived + row * KV_HEADS + kv_head
            before = gl.atomic_add(counter, stop - split, sem="acq_rel", scope="gpu")
            gl.thread_barrier()
            if before + stop - split == num_splits:
                for each in range(count):
                    join_splits(
                        out + (token + each) * out_token,
                        sums,
                        stats,
                        first_partial + each * num_splits,
                        num_splits,
                        kv_head,
                        out_head,
                        KV_HEADS,
                        GROUP,
                        DIM,
                    )
                gl.store(counter, 0)


# The producer warp of decode attention on Hopper: loads the keys and values of a program's share, in order.
#
# It runs as far ahead of the warps that compute (`hopper_decode.py`) as there are stages. Keys that existed before the
# step are loaded while the previous kernels still compute the newest ones.


@gluon.jit
def fetch_blocks(
    sources,
    blocks,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The work of the warp. `sources`: what is loaded, `blocks`: the stages and their barriers."""
    keys, values, key_scales, value_scales, table, table_stride, singles, shares = sources
    k, v, there, used, scales = blocks
    kv_head, first, first_split, last, last_split, end = splits_of_program(shares, KV_HEADS)
    done = 0
    for single in range(first, end):
        row, token, begin, size, num_splits, first_partial, length, count, split, stop = read_single(
            singles, single, first, first_split, last, last_split
        )
        pages = table + row * table_stride
        settled = gl.load(singles + gl.cast(single, gl.int64) * SINGLE_RECORD + 7)
        first_key = first_block(begin + split * size, length, count, QUERIES, BLOCK_N, WINDOW)
        if key_scales is not None:
            following = find_starts(pages, first_key, length, BLOCK_N, PAGE)
        for start in range(first_key, gl.minimum(begin + stop * size, length), BLOCK_N):
            # page lookup before the wait for a free stage; for FP8, whose blocks are smaller, a block before
            if key_scales is not None:
                starts = following
                following = find_starts(pages, start + BLOCK_N, length, BLOCK_N, PAGE)
            else:
                starts = find_starts(pages, start, length, BLOCK_N, PAGE)
            if start + BLOCK_N > settled:
                wait_for_previous(DEPENDENT)
            stage = done % STAGES
            bar = there.index(stage)
            mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
            if key_scales is not None:
                PARTS: gl.constexpr = scales.shape[0] // (2 * STAGES)
                mbarrier.expect(bar, 2 * fp8_block_bytes(DIM, BLOCK_N, PAGE))
                part = 2 * stage * PARTS
                copy_fp8_block(
                    keys, key_scales, starts, kv_head, bar, k.index(stage), scales, part, KV_HEADS, DIM, BLOCK_N, PAGE
                )
                part += PARTS
                copy_fp8_block(
                    values,
                    value_scales,
                    starts,
                    kv_head,
                    bar,
                    v.index(stage),
                    scales,
                    part,
                    KV_HEADS,
                    DIM,
                    BLOCK_N,
                    PAGE,
                )
            else:
                mbarrier.expect(bar, 2 * BLOCK_N * DIM * 2)
                copy_parts(keys, starts, kv_head, bar, k.index(stage), DIM, BLOCK_N, PAGE)
                copy_parts(values, starts, kv_head, bar, v.index(stage), DIM, BLOCK_N, PAGE)
            done += 1


@gluon.jit
def first_block(key, length, count, QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """The first block from `key` on that a query sees."""
    if WINDOW:
        if QUERIES == 1:
            count = 1
        key = gl.maximum(key, gl.maximum(length - count + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N)
    return key
