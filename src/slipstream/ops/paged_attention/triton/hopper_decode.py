"""Decode attention on Hopper: one producer warp loads keys and values, across splits and rows, and four warps compute.

Splits are those of `decode.py`. Memory is not idle between rows: while the sums of one row are stored and merged,
the keys of the next are in flight. Keys are the left operand of the MMAs, since tensor cores take 64 rows at a time and
a group has few query heads: padding would cost time and power. Keys that existed before the step are loaded while the
previous kernels still compute the newest ones.
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

from slipstream.ops.paged_attention.tile_list import SINGLE_RECORD, TileList
from slipstream.ops.paged_attention.triton.hopper import (
    clear_past_end,
    copy_parts,
    describe,
    find_starts,
    make_barriers,
)
from slipstream.ops.paged_attention.triton.launch import head_shape, launch_strides
from slipstream.ops.paged_attention.triton.online_softmax import LOG2E
from slipstream.ops.paged_attention.triton.split_schedule import read_single, splits_of_program
from slipstream.ops.pdl import dependent, release_next, wait_for_previous

# A block has a fixed cost, large or small, which matters most with few rows: then blocks are larger and a
# multiprocessor runs one program. Otherwise it runs two, each with half the registers. Blocks of heads of 256 take all
# of the shared memory: one program, and small blocks.
BLOCK_KEYS, FEW_BLOCK_KEYS = gl.constexpr(64), 128
EVEN_REGISTERS, FEW_EVEN_REGISTERS = 128, 168  # per thread
FETCH_REGISTERS, FEW_FETCH_REGISTERS = gl.constexpr(24), gl.constexpr(40)
WIDE_HEAD = gl.constexpr(256)


def programs_per_sm(head_dim: int, has_few_rows: bool) -> int:
    return 1 if has_few_rows or head_dim >= WIDE_HEAD.value else 2


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
    is_alone = programs_per_sm(dim, tile_list.has_few_rows) == 1
    block = FEW_BLOCK_KEYS if is_alone and dim < WIDE_HEAD.value else BLOCK_KEYS.value
    _split_kernel[((len(tile_list.shares) - 1) * keys.shape[2],)](
        out,
        query,
        describe(keys, block),
        describe(values, block),
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
        STAGES=3 if dim > 64 else 6,
        WINDOW=window,
        num_warps=4,
        maxnreg=FEW_EVEN_REGISTERS if is_alone else EVEN_REGISTERS,
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
    k = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    v = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    # the right operands of the MMAs
    LANES: gl.constexpr = max(8, triton.next_power_of_2(GROUP * QUERIES))
    queries = gl.allocate_shared_memory(DTYPE, [LANES, DIM], SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [LANES, BLOCK_N], SHARED)
    blocks = (k, v, make_barriers(STAGES, 1), make_barriers(STAGES, 1))
    fence_async_shared()
    tensors = (out, query, singles, shares, arrived, sums, stats, sinks, scale)
    strides = (query_token, query_head, out_token, out_head)
    sources = (keys, values, table, table_stride, singles, shares)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    tensors,
                    strides,
                    blocks,
                    (queries, weights),
                    KV_HEADS,
                    GROUP,
                    DIM,
                    QUERIES,
                    BLOCK_N,
                    STAGES,
                    WINDOW,
                    DEPENDENT,
                ),
            ),
            (_fetch, (sources, blocks, KV_HEADS, DIM, QUERIES, BLOCK_N, PAGE, STAGES, WINDOW, DEPENDENT)),
        ],
        [1],
        [FETCH_REGISTERS if BLOCK_N == BLOCK_KEYS and DIM < WIDE_HEAD else FEW_FETCH_REGISTERS],
    )


@gluon.jit
def _fetch(
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
    """The producer warp: loads keys and values of this program's share, in order."""
    keys, values, table, table_stride, singles, shares = sources
    k, v, there, used = blocks
    kv_head, first, first_split, last, last_split, end = splits_of_program(shares, KV_HEADS)
    done = 0
    for single in range(first, end):
        row, token, begin, size, num_splits, first_partial, length, count, split, stop = read_single(
            singles, single, first, first_split, last, last_split
        )
        pages = table + row * table_stride
        settled = gl.load(singles + gl.cast(single, gl.int64) * SINGLE_RECORD + 7)
        first_key = _first_key(begin + split * size, length, count, QUERIES, BLOCK_N, WINDOW)
        for start in range(first_key, gl.minimum(begin + stop * size, length), BLOCK_N):
            # page lookup before the wait for a free stage
            starts = find_starts(pages, start, length, BLOCK_N, PAGE)
            if start + BLOCK_N > settled:
                wait_for_previous(DEPENDENT)
            stage = done % STAGES
            bar = there.index(stage)
            mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * BLOCK_N * DIM * 2)
            copy_parts(keys, starts, kv_head, bar, k.index(stage), DIM, BLOCK_N, PAGE)
            copy_parts(values, starts, kv_head, bar, v.index(stage), DIM, BLOCK_N, PAGE)
            done += 1


@gluon.jit
def _first_key(key, length, count, QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """The first block from `key` on that a query sees."""
    if WINDOW:
        if QUERIES == 1:
            count = 1
        key = gl.maximum(key, gl.maximum(length - count + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N)
    return key


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
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The consumer warps: the sums of this program's share, and the output of rows whose last split is in it."""
    out, query, singles, shares, arrived, sums, stats, sinks, scale = tensors
    query_token, query_head, out_token, out_head = strides
    k, v, there, used = blocks
    queries, weights = own
    DTYPE: gl.constexpr = query.dtype.element_ty
    LANES: gl.constexpr = queries.shape[0]
    # [keys or dimensions, heads]: a head of one query is a column
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 16])
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    factor = scale * LOG2E
    q_lane = gl.expand_dims(gl.arange(0, LANES, gl.SliceLayout(1, BY_ROW)), 1)
    q_dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, BY_ROW)), 0)
    lane = gl.arange(0, LANES, gl.SliceLayout(0, SUMS))
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(1, SUMS)), 1)
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
            first_key = _first_key(begin_keys, length, count, QUERIES, BLOCK_N, WINDOW)
            for start in range(first_key, gl.minimum(begin_keys + size, length), BLOCK_N):
                stage = done % STAGES
                mbarrier.wait(there.index(stage), done // STAGES & 1)
                nothing = gl.zeros([BLOCK_N, LANES], gl.float32, SUMS)
                score = warpgroup_mma(k.index(stage), queries.permute((1, 0)), nothing, use_acc=False, is_async=True)
                score = warpgroup_mma_wait(0, deps=(score,))
                visible = gl.expand_dims(start + key, 1) < gl.expand_dims(seen, 0)
                if WINDOW:
                    visible = visible & (gl.expand_dims(start + key, 1) >= gl.expand_dims(seen - WINDOW, 0))
                score = gl.where(visible, score * factor, float("-inf"))
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
                weights.store(gl.permute(weight.to(DTYPE), (1, 0)))
                fence_async_shared()
                if start + BLOCK_N > length:
                    clear_past_end(v.index(stage), length - start, BY_ROW, BLOCK_N)
                gl.thread_barrier()
                acc = warpgroup_mma(v.index(stage).permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(used.index(stage), count=1)
                done += 1

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
                    _join(
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


@gluon.jit
def _join(
    out,
    sums,
    stats,
    first,
    num_splits,
    kv_head,
    out_head,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
):
    """Merges all splits of a query and kv head into its output, a few at a time, in key order."""
    LANES: gl.constexpr = triton.next_power_of_2(GROUP)
    SPLITS: gl.constexpr = triton.next_power_of_2(triton.cdiv(32, LANES))
    # warps are spread over the heads if there are enough, so that each warp sums all splits of its heads
    WARPS: gl.constexpr = [1, 4, 1] if LANES >= 4 else [4, 1, 1]
    PARTS: gl.constexpr = gl.BlockedLayout([1, 1, DIM // 32], [1, 1, 32], WARPS, [2, 1, 0])
    EACH: gl.constexpr = gl.SliceLayout(2, PARTS)  # [SPLITS, LANES]
    WHOLE: gl.constexpr = gl.SliceLayout(0, PARTS)  # [LANES, DIM]
    split = gl.expand_dims(gl.arange(0, SPLITS, gl.SliceLayout(1, EACH)), 1)
    lane = gl.expand_dims(gl.arange(0, LANES, gl.SliceLayout(0, EACH)), 0)
    dim = gl.arange(0, DIM, gl.SliceLayout(0, WHOLE))
    head = kv_head * GROUP + lane
    top = gl.full([LANES], float("-inf"), gl.float32, gl.SliceLayout(0, EACH))
    total = gl.zeros([LANES], gl.float32, gl.SliceLayout(0, EACH))
    acc = gl.zeros([LANES, DIM], gl.float32, WHOLE)
    for start in range(0, num_splits, SPLITS):
        partial = (first + start + split) * (KV_HEADS * GROUP) + head
        mask = (start + split < num_splits) & (lane < GROUP)
        # bypass L1: other multiprocessors wrote these
        tops = gl.load(stats + partial * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(stats + partial * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        where = sums + gl.expand_dims(partial * DIM, 2) + gl.expand_dims(gl.expand_dims(dim, 0), 0)
        part = gl.load(where, mask=gl.expand_dims(mask, 2), other=0.0, cache_modifier=".cg")
        higher = gl.maximum(top, gl.max(tops, 0))
        # lanes past the group have no maximum
        base = gl.where(higher == float("-inf"), 0.0, higher)
        fade = gl.exp2(top - base)
        weight = gl.exp2(tops - gl.expand_dims(base, 0))
        total = total * fade + gl.sum(totals * weight, 0)
        fade = gl.convert_layout(fade, gl.SliceLayout(1, WHOLE))
        acc = acc * gl.expand_dims(fade, 1) + gl.sum(part * gl.expand_dims(weight, 2), 0)
        top = higher
    total = gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, WHOLE))
    lane = gl.arange(0, LANES, gl.SliceLayout(1, WHOLE))
    where = out + gl.expand_dims((kv_head * GROUP + lane) * out_head, 1) + gl.expand_dims(dim, 0)
    gl.store(where, (acc / gl.expand_dims(total, 1)).to(out.dtype.element_ty), mask=gl.expand_dims(lane < GROUP, 1))
