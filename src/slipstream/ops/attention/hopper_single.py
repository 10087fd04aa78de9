"""Decode attention of a single row on Hopper, with norm, RoPE and cache write of its new key in the same kernel.

Keys and values of earlier steps are loaded while the GEMM before still computes the new ones: no load waits. A program
norms and rotates the queries of its heads. The program that has the last split also norms and rotates the new key,
writes key and value to their slot, and over the old content of that slot in the blocks in shared memory. Programs
without keys end at once, so that the next kernel has their shared memory early.

A step of several rows cannot do this: a row may read a key that another row writes in the same step.
Splits are those of `decode.py`; every NUM-th split belongs to a program.
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

from slipstream.ops.attention.decode import Partials
from slipstream.ops.attention.hopper import clear_past_end, copy_parts, describe, find_starts, join_splits
from slipstream.ops.attention.launch import LOG2E, head_shape
from slipstream.ops.attention.tile_list import TileList
from slipstream.ops.platform.pdl import dependent, make_barriers, release_next, wait_for_previous

BLOCK_KEYS, STAGES = 128, 3
REGISTERS, FETCH_REGISTERS = 168, gl.constexpr(40)  # per thread


def attend_single(
    query_key: torch.Tensor,  # [1, heads + kv heads, dim]
    value: torch.Tensor,  # [1, kv heads, dim]
    weight: torch.Tensor | None,  # [heads + kv heads, dim]: of an RMS norm per head
    eps: float,
    rotary: torch.Tensor,  # [1, 2, dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    slots: torch.Tensor,  # [1] int64
    page_table: torch.Tensor,  # [1, width] int64
    tile_list: TileList,
    partials: Partials,
    scale: float,
) -> torch.Tensor:
    """For a row that `serves_single` accepts: the output [1, heads, dim]. The new key and value are written to their
    slot."""
    num_kv_heads, dim = keys.shape[2:]
    num_heads = query_key.shape[1] - num_kv_heads
    assert rotary.is_contiguous() and (weight is None or weight.is_contiguous())
    out = torch.empty((1, num_heads, dim), dtype=query_key.dtype, device=query_key.device)
    num_programs = len(tile_list.shares) - 1
    _single_kernel[(num_programs * num_kv_heads,)](
        out,
        query_key,
        value,
        weight,
        rotary,
        slots,
        keys,
        values,
        describe(keys, BLOCK_KEYS),
        describe(values, BLOCK_KEYS),
        page_table,
        tile_list.singles,
        tile_list.arrived,
        partials.sums,
        partials.stats,
        eps,
        scale,
        num_programs,
        BLOCK_N=BLOCK_KEYS,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=REGISTERS,
        **head_shape(out, keys),
        **dependent(out.device, 1),
    )
    return out


# grid: (programs x kv heads,)
@gluon.jit(do_not_specialize=["num_programs"], do_not_specialize_on_alignment=["table", "slots"])
def _single_kernel(
    out,
    query_key,
    value,
    weight,
    rotary,
    slots,
    key_pages,
    value_pages,
    keys,  # descriptors of the pages
    values,
    table,
    singles,
    arrived,
    sums,
    stats,
    eps,
    scale,
    num_programs,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    release_next(DEPENDENT)
    DTYPE: gl.constexpr = out.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], DTYPE)
    LANES: gl.constexpr = max(8, triton.next_power_of_2(GROUP))
    k = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    v = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    queries = gl.allocate_shared_memory(DTYPE, [LANES, DIM], SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [LANES, BLOCK_N], SHARED)
    blocks = (k, v, make_barriers(STAGES, 1), make_barriers(STAGES, 1))
    fence_async_shared()
    given = (query_key, value, weight, rotary, slots, eps, scale)
    results = (out, key_pages, value_pages, arrived, sums, stats)
    SIZES: gl.constexpr = (KV_HEADS, GROUP, DIM, BLOCK_N, PAGE, STAGES)
    gl.warp_specialize(
        [
            (_compute, (given, results, blocks, queries, weights, singles, num_programs, SIZES, DEPENDENT)),
            (_fetch, (keys, values, table, blocks, singles, num_programs, SIZES)),
        ],
        [1],
        [FETCH_REGISTERS],
    )


@gluon.jit
def _read(singles):
    """First key, keys per split, number of splits, length."""
    return gl.load(singles + 2), gl.load(singles + 3), gl.load(singles + 4), gl.load(singles + 6)


@gluon.jit
def _fetch(keys, values, table, blocks, singles, num_programs, SIZES: gl.constexpr):
    """The producer warp. Its keys are older than the step: it never waits for the kernel before."""
    KV_HEADS: gl.constexpr = SIZES[0]
    DIM: gl.constexpr = SIZES[2]
    BLOCK_N: gl.constexpr = SIZES[3]
    PAGE: gl.constexpr = SIZES[4]
    STAGES: gl.constexpr = SIZES[5]
    k, v, there, used = blocks
    kv_head = gl.program_id(0) % KV_HEADS
    begin, size, num_splits, length = _read(singles)
    done = 0
    for split in range(gl.program_id(0) // KV_HEADS, num_splits, num_programs):
        first = begin + split * size
        for start in range(first, gl.minimum(first + size, length), BLOCK_N):
            starts = find_starts(table, start, length, BLOCK_N, PAGE)
            stage = done % STAGES
            bar = there.index(stage)
            mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * BLOCK_N * DIM * 2)
            copy_parts(keys, starts, kv_head, bar, k.index(stage), DIM, BLOCK_N, PAGE)
            copy_parts(values, starts, kv_head, bar, v.index(stage), DIM, BLOCK_N, PAGE)
            done += 1


@gluon.jit
def _half_offsets(COUNT: gl.constexpr, HALF: gl.constexpr):
    """Heads [COUNT, 1] and dimensions [1, HALF] of half a head, so that a thread has both halves of a pair."""
    BY_HEAD: gl.constexpr = gl.BlockedLayout([1, 4], [32 * 4 // HALF, HALF // 4], [4, 1], [1, 0])
    head = gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(1, BY_HEAD)), 1)
    return head, gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, BY_HEAD)), 0)


@gluon.jit
def _load_factors(weight, head, dim, mask, DIM: gl.constexpr):
    if weight is None:
        return 1.0, 1.0
    else:
        where = weight + head * DIM + dim
        low = gl.load(where, mask=mask, other=0.0).to(gl.float32)
        return low, gl.load(where + DIM // 2, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _norm_and_rotate(low, high, factors, rotation, weight, eps, DTYPE: gl.constexpr, DIM: gl.constexpr):
    """As the kernel of `ops/attention/rope_triton.py`."""
    low, high = low.to(gl.float32), high.to(gl.float32)
    cos, sin = rotation
    if weight is not None:
        scale = gl.rsqrt(gl.sum(gl.fma(low, low, high * high), 1) / DIM + eps)
        scale = gl.expand_dims(scale, 1)
        low, high = low * (scale * factors[0]), high * (scale * factors[1])
    return gl.fma(low, cos, -(high * sin)).to(DTYPE), gl.fma(high, cos, low * sin).to(DTYPE)


@gluon.jit
def _replace_row(block, stage, row, low, high, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """Writes one row of a stage of `block`. low and high are [8, DIM / 2] with equal rows. In shared memory the halves
    of DIM lie one after the other, as tiles of 8 rows."""
    HALF: gl.constexpr = DIM // 2
    TILES: gl.constexpr = BLOCK_N // 8
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles = block._reinterpret(block.dtype, [STAGES * 2 * TILES, 8, HALF], TILE)
    lane, dim = _half_offsets(8, HALF)
    is_own = lane == row % 8
    tile = tiles.index(stage * 2 * TILES + row // 8)
    tile.store(gl.where(is_own, low, tile.load(low.type.layout)))
    tile = tiles.index((stage * 2 + 1) * TILES + row // 8)
    tile.store(gl.where(is_own, high, tile.load(high.type.layout)))


@gluon.jit
def _compute(
    given, results, blocks, queries, weights, singles, num_programs, SIZES: gl.constexpr, DEPENDENT: gl.constexpr
):
    """The consumer warps."""
    KV_HEADS: gl.constexpr = SIZES[0]
    begin, size, num_splits, length = _read(singles)
    own = gl.program_id(0) // KV_HEADS
    # a row has a split in any case, so some programs wait for the kernel before: this one is not complete without it
    if own < num_splits:
        row = (begin, size, num_splits, length)
        _attend(given, results, blocks, queries, weights, row, num_programs, SIZES, DEPENDENT)


@gluon.jit
def _attend(given, results, blocks, queries, weights, row, num_programs, SIZES: gl.constexpr, DEPENDENT: gl.constexpr):
    KV_HEADS: gl.constexpr = SIZES[0]
    GROUP: gl.constexpr = SIZES[1]
    DIM: gl.constexpr = SIZES[2]
    BLOCK_N: gl.constexpr = SIZES[3]
    STAGES: gl.constexpr = SIZES[5]
    HALF: gl.constexpr = DIM // 2
    query_key, value, weight, rotary, slots, eps, scale = given
    out, key_pages, value_pages, arrived, sums, stats = results
    k, v, there, used = blocks
    begin, size, num_splits, length = row
    DTYPE: gl.constexpr = out.dtype.element_ty
    LANES: gl.constexpr = queries.shape[0]
    NUM_HEADS: gl.constexpr = KV_HEADS * GROUP
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 16])
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    own, kv_head = gl.program_id(0) // KV_HEADS, gl.program_id(0) % KV_HEADS
    lane = gl.arange(0, LANES, gl.SliceLayout(0, SUMS))
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(1, SUMS)), 1)
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    is_query = lane < GROUP
    head = kv_head * GROUP + lane
    # heads of queries, and eight equal rows for the new key
    q_lane, q_dim = _half_offsets(LANES, HALF)
    k_lane, k_dim = _half_offsets(8, HALF)
    is_real = q_lane < GROUP
    q_factors = _load_factors(weight, kv_head * GROUP + q_lane, q_dim, is_real, DIM)
    k_factors = _load_factors(weight, NUM_HEADS + kv_head + k_lane * 0, k_dim, k_lane < 8, DIM)
    has_new = (num_splits - 1 - own) % num_programs == 0
    wait_for_previous(DEPENDENT)
    q_where = query_key + (kv_head * GROUP + q_lane) * DIM + q_dim
    q_low = gl.load(q_where, mask=is_real, other=0.0)
    q_high = gl.load(q_where + HALF, mask=is_real, other=0.0)
    cos = gl.load(rotary + q_dim + q_lane * 0).to(gl.float32)
    sin = gl.load(rotary + DIM + HALF + q_dim + q_lane * 0).to(gl.float32)
    is_new = (k_lane < 8) & has_new
    k_where = query_key + (NUM_HEADS + kv_head) * DIM + k_dim + k_lane * 0
    k_low = gl.load(k_where, mask=is_new, other=0.0)
    k_high = gl.load(k_where + HALF, mask=is_new, other=0.0)
    v_where = value + kv_head * DIM + k_dim + k_lane * 0
    v_low = gl.load(v_where, mask=is_new, other=0.0)
    v_high = gl.load(v_where + HALF, mask=is_new, other=0.0)
    slot = gl.load(slots)
    # while these loads are on their way: the end of the row, if it is in the first blocks of this program
    first = begin + own * size
    last = (length - 1 - first) // BLOCK_N
    is_cleared = (own == num_splits - 1) & (last < STAGES)
    if is_cleared & (first < length):
        mbarrier.wait(there.index(last), 0)
        clear_past_end(v.index(last), length - first - last * BLOCK_N, BY_ROW, BLOCK_N)
    q_low, q_high = _norm_and_rotate(q_low, q_high, q_factors, (cos, sin), weight, eps, DTYPE, DIM)
    queries.slice(0, HALF, 1).store(q_low)
    queries.slice(HALF, HALF, 1).store(q_high)
    if LANES > 8:
        cos = gl.load(rotary + k_dim + k_lane * 0).to(gl.float32)
        sin = gl.load(rotary + DIM + HALF + k_dim + k_lane * 0).to(gl.float32)
    k_low, k_high = _norm_and_rotate(k_low, k_high, k_factors, (cos, sin), weight, eps, DTYPE, DIM)
    fence_async_shared()
    gl.thread_barrier()
    factor = scale * LOG2E
    done = 0
    for split in range(own, num_splits, num_programs):
        # columns past the last query have weight 0
        top = gl.where(is_query, float("-inf"), 1e30)
        totals = gl.zeros([BLOCK_N, LANES], gl.float32, SUMS)
        acc = gl.zeros([DIM, LANES], gl.float32, SUMS)
        first = begin + split * size
        for start in range(first, gl.minimum(first + size, length), BLOCK_N):
            stage = done % STAGES
            mbarrier.wait(there.index(stage), done // STAGES & 1)
            newest = length - 1 - start
            if newest < BLOCK_N:
                _replace_row(k, stage, newest, k_low, k_high, STAGES, BLOCK_N, DIM)
                fence_async_shared()
                gl.thread_barrier()
            nothing = gl.zeros([BLOCK_N, LANES], gl.float32, SUMS)
            score = warpgroup_mma(k.index(stage), queries.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if newest < BLOCK_N:
                if is_cleared == 0:
                    clear_past_end(v.index(stage), newest + 1, BY_ROW, BLOCK_N)
                    gl.thread_barrier()
                _replace_row(v, stage, newest, v_low, v_high, STAGES, BLOCK_N, DIM)
            score = warpgroup_mma_wait(0, deps=(score,))
            visible = gl.expand_dims(start + key < length, 1)
            score = gl.where(visible, score * factor, float("-inf"))
            higher = gl.maximum(top, gl.max(score, 0))
            weighed = gl.exp2(score - gl.expand_dims(higher, 0))
            fade = gl.expand_dims(gl.exp2(top - higher), 0)
            totals = totals * fade + weighed
            top = higher
            acc = acc * fade
            weights.store(gl.permute(weighed.to(DTYPE), (1, 0)))
            fence_async_shared()
            gl.thread_barrier()
            acc = warpgroup_mma(v.index(stage).permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(used.index(stage), count=1)
            done += 1
        total = gl.sum(totals, 0)
        if num_splits == 1:
            result = acc / gl.expand_dims(gl.where(total > 0, total, 1.0), 0)
            gl.store(out + gl.expand_dims(head * DIM, 0) + dim, result.to(DTYPE), mask=gl.expand_dims(is_query, 0))
        else:
            partial = split * NUM_HEADS + head
            gl.store(sums + gl.expand_dims(partial * DIM, 0) + dim, acc, mask=gl.expand_dims(is_query, 0))
            gl.store(stats + partial * 2, top, mask=is_query)
            gl.store(stats + partial * 2 + 1, total, mask=is_query)
    if has_new:  # at the end, since fences wait for stores
        cache_at = (slot * KV_HEADS + kv_head) * DIM + k_dim + k_lane * 0
        gl.store(key_pages + cache_at, k_low, mask=k_lane == 0)
        gl.store(key_pages + cache_at + HALF, k_high, mask=k_lane == 0)
        gl.store(value_pages + cache_at, v_low, mask=k_lane == 0)
        gl.store(value_pages + cache_at + HALF, v_high, mask=k_lane == 0)
    if num_splits > 1:
        gl.thread_barrier()  # all threads store their partial results before one increments the counter
        finished = (num_splits - 1 - own) // num_programs + 1
        counter = arrived + kv_head
        before = gl.atomic_add(counter, finished, sem="acq_rel", scope="gpu")
        gl.thread_barrier()
        if before + finished == num_splits:
            join_splits(out, sums, stats, 0, num_splits, kv_head, DIM, KV_HEADS, GROUP, DIM)
            gl.store(counter, 0)
