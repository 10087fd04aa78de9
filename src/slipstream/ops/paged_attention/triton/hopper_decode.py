"""Decode on Hopper: one warp fetches keys and values, across splits, and four compute.

The same work as in `decode.py`. Memory is never idle between two splits: while the sums of one are stored and joined,
the keys of the next are on their way.
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

from slipstream.ops.dependent import dependent, release_next, wait_for_previous
from slipstream.ops.paged_attention.triton.hopper import clear_past_end, copy_block, describe, make_barriers
from slipstream.ops.paged_attention.triton.keys import LOG2E
from slipstream.ops.paged_attention.work import RECORD, Work

BLOCK_KEYS = 64
PROGRAMS_PER_SM = 2
ROWS = gl.constexpr(64)  # of a product, the heads that share keys first among them; the rest are zeros
EVEN_REGISTERS = 128
FETCH_REGISTERS = gl.constexpr(24)


def attend_splits(
    out: torch.Tensor,  # [T, heads, dim]
    query: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    page_table: torch.Tensor,  # [B, width] int64
    work: Work,
    sums: torch.Tensor,  # [splits, heads, dim] float32
    stats: torch.Tensor,  # [splits, heads, 2] float32
    scale: float,
    num_programs: int,
) -> None:
    num_heads, dim = query.shape[1:]
    page_size, num_kv_heads = keys.shape[1:3]
    _split_kernel[(num_programs,)](
        out,
        query,
        describe(keys, BLOCK_KEYS),
        describe(values, BLOCK_KEYS),
        page_table,
        work.splits,
        work.totals,
        work.arrived,
        sums,
        stats,
        scale,
        page_table.stride(0),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        DIM=dim,
        BLOCK_N=BLOCK_KEYS,
        PAGE=page_size,
        STAGES=3 if dim > 64 else 6,
        num_warps=4,
        maxnreg=EVEN_REGISTERS,
        **dependent(out.device, len(query)),
    )


# grid: (k x SMs,) over (split, kv head)
@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table"])
def _split_kernel(
    out,
    query,
    keys,
    values,
    table,
    work,
    totals,
    arrived,
    sums,
    stats,
    scale,
    table_stride,
    query_token,
    query_head,
    out_token,
    out_head,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    release_next(DEPENDENT)
    DTYPE: gl.constexpr = query.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], DTYPE)
    k = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    v = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    there, used = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    fence_async_shared()
    wait_for_previous(DEPENDENT)
    tensors = (out, query, work, totals, arrived, sums, stats, scale, query_token, query_head, out_token, out_head)
    sources = (keys, values, table, table_stride, work, totals)
    gl.warp_specialize(
        [
            (_compute, (tensors, k, v, there, used, KV_HEADS, GROUP, DIM, BLOCK_N, STAGES)),
            (_fetch, (sources, k, v, there, used, KV_HEADS, DIM, BLOCK_N, PAGE, STAGES)),
        ],
        [1],
        [FETCH_REGISTERS],
    )


@gluon.jit
def _fetch(
    sources,
    k,
    v,
    there,
    used,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp: keys and values of all splits of this program, in their order."""
    keys, values, table, table_stride, work, totals = sources
    num_items = gl.load(totals) * KV_HEADS
    done = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        kv_head = item % KV_HEADS
        record = work + (item // KV_HEADS).to(gl.int64) * RECORD
        pages = table + gl.load(record).to(gl.int64) * table_stride
        begin = gl.load(record + 2)
        end = gl.load(record + 3)
        length = gl.load(record + 6)
        for start in range(begin, end, BLOCK_N):
            stage = done % STAGES
            bar = there.index(stage)
            mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * BLOCK_N * DIM * 2)
            copy_block(keys, pages, start, length, kv_head, bar, k.index(stage), DIM, BLOCK_N, PAGE)
            copy_block(values, pages, start, length, kv_head, bar, v.index(stage), DIM, BLOCK_N, PAGE)
            done += 1


@gluon.jit
def _compute(
    tensors,
    k,
    v,
    there,
    used,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps: the sums of all splits of this program, and the output of rows whose last split is among them."""
    out, query, work, totals, arrived, sums, stats, scale, query_token, query_head, out_token, out_head = tensors
    DTYPE: gl.constexpr = query.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    factor = scale * LOG2E
    q_lane = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, QUERIES)), 1)
    q_dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, QUERIES)), 0)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, SUMS)), 0)
    mask = gl.expand_dims(lane < GROUP, 1)
    num_items = gl.load(totals) * KV_HEADS
    done = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        place = (item // KV_HEADS).to(gl.int64)
        kv_head = item % KV_HEADS
        record = work + place * RECORD
        row = gl.load(record).to(gl.int64)
        token = gl.load(record + 1).to(gl.int64)
        begin = gl.load(record + 2)
        end = gl.load(record + 3)
        index = gl.load(record + 4)
        num_splits = gl.load(record + 5)
        length = gl.load(record + 6)

        q_place = token * query_token + (kv_head * GROUP + q_lane) * query_head + q_dim
        q = gl.load(query + q_place, mask=(q_lane < GROUP) & (q_dim < DIM), other=0.0)
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([ROWS, DIM], gl.float32, SUMS)
        for start in range(begin, end, BLOCK_N):
            stage = done % STAGES
            mbarrier.wait(there.index(stage), done // STAGES & 1)
            nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
            score = warpgroup_mma(q, k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            score = warpgroup_mma_wait(0, deps=(score,))
            key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
            score = gl.where(gl.expand_dims(key < end, 0), score, float("-inf"))
            higher = gl.maximum(top, gl.max(score, 1) * factor)
            weight = gl.exp2(score * factor - gl.expand_dims(higher, 1))
            fade = gl.exp2(top - higher)
            total = total * fade + gl.sum(weight, 1)
            top = higher
            acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, SUMS)), 1)
            weight = gl.convert_layout(weight.to(DTYPE), WEIGHTS)
            if start + BLOCK_N > length:
                clear_past_end(v.index(stage), length - start, LINES, BLOCK_N)
            acc = warpgroup_mma(weight, v.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(used.index(stage), count=1)
            done += 1

        top = gl.convert_layout(top, gl.SliceLayout(1, SUMS))
        total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
        head = kv_head * GROUP + lane
        if num_splits == 1:
            result = acc / gl.expand_dims(gl.where(total > 0, total, 1.0), 1)
            where = out + token * out_token + gl.expand_dims(head * out_head, 1) + dim
            gl.store(where, result.to(DTYPE), mask=mask)
        else:
            partial = place * (KV_HEADS * GROUP) + head
            gl.store(sums + gl.expand_dims(partial * DIM, 1) + dim, acc, mask=mask)
            gl.store(stats + partial * 2, top, mask=lane < GROUP)
            gl.store(stats + partial * 2 + 1, total, mask=lane < GROUP)
            # every thread's stores are made before one of them tells of it
            gl.thread_barrier()
            counter = arrived + row * KV_HEADS + kv_head
            before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            gl.thread_barrier()
            if before == num_splits - 1:
                _join(
                    out + token * out_token,
                    sums,
                    stats,
                    place - index,
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
    """All splits of a row and kv head into its output, a few at a time, in the order of the keys."""
    LANES: gl.constexpr = triton.next_power_of_2(GROUP)
    SPLITS: gl.constexpr = triton.next_power_of_2(triton.cdiv(32, LANES))
    # warps side by side over the heads where there are enough: then each sums all its splits alone
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
        # past the L1: other multiprocessors wrote these
        tops = gl.load(stats + partial * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(stats + partial * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        where = sums + gl.expand_dims(partial * DIM, 2) + gl.expand_dims(gl.expand_dims(dim, 0), 0)
        part = gl.load(where, mask=gl.expand_dims(mask, 2), other=0.0, cache_modifier=".cg")
        higher = gl.maximum(top, gl.max(tops, 0))
        # lanes past the group have no top
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
