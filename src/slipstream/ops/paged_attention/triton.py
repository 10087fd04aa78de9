"""Attention over pages on CUDA.

Both kernels run a fixed grid over work that `work.py` listed on the device. Query heads that share a key head are
rows of one tile, so that each key is read once for all of them. Weights are exp2 of scores in float32, with the
scale folded in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from slipstream.ops.paged_attention.work import RECORD, Work

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class KernelShape:
    """How a kernel is compiled and launched."""

    keys: int  # in one block
    warps: int
    stages: int
    programs_per_sm: int
    tile: int = 0  # rows of queries, in the kernel that cuts along queries


def decode_shape(head_dim: int, itemsize: int) -> KernelShape:
    width = _pad(head_dim) * itemsize  # bytes of one key
    return KernelShape(keys=64 if width <= 256 else 32, warps=4, stages=3 if width <= 512 else 2, programs_per_sm=3)


def query_tile(head_dim: int, itemsize: int) -> int:
    """Rows of queries in one tile, a row being one head of one token."""
    if itemsize <= 2:
        return 128
    # no matrix unit takes float32 as it is: tiles small enough for plain arithmetic
    return 64 if _pad(head_dim) <= 128 else 32


def varlen_shape(head_dim: int, itemsize: int, shared_memory: int) -> KernelShape:
    tile = query_tile(head_dim, itemsize)
    width = _pad(head_dim) * itemsize
    keys, stages = (64, 3) if itemsize <= 2 else (32, 2)
    while (tile + 2 * stages * keys) * width > shared_memory and keys > 16:
        if stages > 1:
            stages -= 1
        else:
            keys //= 2
    return KernelShape(keys=keys, warps=8, stages=stages, programs_per_sm=1, tile=tile)


@dataclass(frozen=True, slots=True)
class Partials:
    """What the splits of a row leave for the last of them to join."""

    sums: torch.Tensor  # [splits, heads, dim] float32
    stats: torch.Tensor  # [splits, heads, 2] float32: top score, sum of weights


def make_partials(work: Work, num_heads: int, head_dim: int) -> Partials:
    splits, device = len(work.splits), work.splits.device
    return Partials(
        torch.empty(splits, num_heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(splits, num_heads, 2, dtype=torch.float32, device=device),
    )


def attend_splits(
    out: torch.Tensor,  # [T, heads, dim]
    query: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    page_table: torch.Tensor,  # [B, width] int64
    work: Work,
    partials: Partials,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    shape: KernelShape | None = None,
) -> None:
    """Rows of one token. Tokens of other rows are left alone."""
    num_heads, dim = query.shape[1:]
    page_size, num_kv_heads = keys.shape[1:3]
    shape = shape or decode_shape(dim, keys.element_size())
    group = num_heads // num_kv_heads
    _check(out, query, keys, values)
    _split_kernel[(_num_programs(out.device, shape, len(work.splits) * num_kv_heads),)](
        out,
        query,
        keys,
        values,
        page_table,
        work.splits,
        work.totals,
        work.arrived,
        partials.sums,
        partials.stats,
        scale,
        soft_cap,
        page_table.stride(0),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK_D=_pad(dim),
        TILE=max(16, triton.next_power_of_2(group)),
        BLOCK_N=shape.keys,
        PAGE=page_size,
        WINDOW=window,
        SOFT_CAP=soft_cap > 0,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def attend_tiles(
    out: torch.Tensor,  # [T, heads, dim]
    query: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    page_table: torch.Tensor,  # [B, width] int64
    work: Work,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    shape: KernelShape | None = None,
) -> None:
    """Rows of several tokens, each seeing the keys up to its own; and zeros for tokens of no row."""
    num_heads, dim = query.shape[1:]
    page_size, num_kv_heads = keys.shape[1:3]
    shape = shape or varlen_shape(dim, keys.element_size(), _device_facts(out.device)[1])
    _check(out, query, keys, values)
    _tile_kernel[(_num_programs(out.device, shape, len(work.tiles) * num_kv_heads),)](
        out,
        query,
        keys,
        values,
        page_table,
        work.tiles,
        work.totals,
        scale,
        soft_cap,
        page_table.stride(0),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        DIM=dim,
        BLOCK_D=_pad(dim),
        TILE=shape.tile,
        BLOCK_N=shape.keys,
        PAGE=page_size,
        WINDOW=window,
        SOFT_CAP=soft_cap > 0,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


# grid: (k x SMs,) over (split, kv head)
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table"])
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
    soft_cap,
    table_stride,
    query_token,
    query_head,
    out_token,
    out_head,
    page_stride,
    slot_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    lane = tl.arange(0, TILE)
    dim = tl.arange(0, BLOCK_D)
    mask = (lane < GROUP)[:, None] & (dim < DIM)[None, :]
    num_items = tl.load(totals) * KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        place = tl.cast(item // KV_HEADS, tl.int64)
        kv_head = item % KV_HEADS
        record = work + place * RECORD
        row = tl.load(record).to(tl.int64)
        token = tl.load(record + 1).to(tl.int64)
        begin = tl.load(record + 2)
        end = tl.load(record + 3)
        index = tl.load(record + 4)
        num_splits = tl.load(record + 5)
        length = tl.load(record + 6)

        head = kv_head * GROUP + lane
        q = tl.load(query + token * query_token + head[:, None] * query_head + dim[None, :], mask=mask, other=0.0)
        top = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, BLOCK_D], tl.float32)
        if WINDOW:
            begin = tl.maximum(begin, tl.maximum(length - WINDOW, 0) // BLOCK_N * BLOCK_N)
        acc, top, total = _attend(
            acc,
            top,
            total,
            q,
            tl.zeros([TILE], tl.int32) + (length - 1),
            keys + kv_head * head_stride,
            values + kv_head * head_stride,
            table + row * table_stride,
            begin,
            end,
            scale,
            soft_cap,
            page_stride,
            slot_stride,
            DIM,
            BLOCK_D,
            BLOCK_N,
            PAGE,
            WINDOW,
            SOFT_CAP,
            True,
        )
        if num_splits == 1:
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            where = out + token * out_token + head[:, None] * out_head + dim[None, :]
            tl.store(where, acc.to(out.dtype.element_ty), mask=mask)
        else:
            partial = place * (KV_HEADS * GROUP) + head
            tl.store(sums + partial[:, None] * DIM + dim[None, :], acc, mask=mask)
            tl.store(stats + partial * 2, top, mask=lane < GROUP)
            tl.store(stats + partial * 2 + 1, total, mask=lane < GROUP)
            # every thread's stores are made before one of them tells of it
            tl.debug_barrier()
            counter = arrived + row * KV_HEADS + kv_head
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
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
                    BLOCK_D,
                )
                tl.store(counter, 0)


@triton.jit
def _join(
    out,
    sums,
    stats,
    first,
    num_splits,
    kv_head,
    out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """All splits of a row and kv head into its output, a few at a time, in the order of the keys."""
    LANES: tl.constexpr = triton.next_power_of_2(GROUP)
    SPLITS: tl.constexpr = triton.next_power_of_2(triton.cdiv(32, LANES))
    split = tl.arange(0, SPLITS)
    lane = tl.arange(0, LANES)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + lane
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, BLOCK_D], tl.float32)
    for start in range(0, num_splits, SPLITS):
        partial = (first + start + split)[:, None] * (KV_HEADS * GROUP) + head[None, :]
        mask = (start + split < num_splits)[:, None] & (lane < GROUP)[None, :]
        # past the L1: other multiprocessors wrote these
        tops = tl.load(stats + partial * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats + partial * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        part = tl.load(
            sums + partial[:, :, None] * DIM + dim[None, None, :],
            mask=mask[:, :, None] & (dim < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(top, tl.max(tops, 0))
        # lanes past the group have no top
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        weight = tl.exp2(tops - base[None, :])
        total = total * fade + tl.sum(totals * weight, 0)
        acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    mask = (lane < GROUP)[:, None] & (dim < DIM)[None, :]
    tl.store(out + head[:, None] * out_head + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)


# grid: (k x SMs,) over (tile, kv head); every second turn runs backwards, so that no program always gets the longer one
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table"])
def _tile_kernel(
    out,
    query,
    keys,
    values,
    table,
    work,
    totals,
    scale,
    soft_cap,
    table_stride,
    query_token,
    query_head,
    out_token,
    out_head,
    page_stride,
    slot_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    dim = tl.arange(0, BLOCK_D)
    num_items = tl.load(totals + 1) * KV_HEADS
    num_turns = tl.cdiv(num_items, num_programs)
    for turn in range(num_turns):
        item = turn * num_programs + tl.where(turn % 2 == 0, program, num_programs - 1 - program)
        if item < num_items:
            kv_head = item % KV_HEADS
            record = work + tl.cast(item // KV_HEADS, tl.int64) * RECORD
            row = tl.load(record).to(tl.int64)
            start = tl.load(record + 1).to(tl.int64)
            count = tl.load(record + 2)
            first = tl.load(record + 3)
            length = tl.load(record + 4)

            lane = first + tl.arange(0, TILE)
            token = lane // GROUP
            head = kv_head * GROUP + lane % GROUP
            mask = (token < count)[:, None] & (dim < DIM)[None, :]
            tokens = (start + token)[:, None]
            q = tl.load(query + tokens * query_token + head[:, None] * query_head + dim[None, :], mask=mask, other=0.0)

            # position of token 0; padding has length 0, hence no keys
            before = length - count
            position = before + tl.minimum(token, count - 1)
            end = tl.minimum(length, before + (first + TILE - 1) // GROUP + 1)
            top = tl.full([TILE], float("-inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
            acc = tl.zeros([TILE, BLOCK_D], tl.float32)
            k_base = keys + kv_head * head_stride
            v_base = values + kv_head * head_stride
            pages = table + row * table_stride
            if WINDOW:
                masked = tl.maximum(before + first // GROUP - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            else:
                # keys that every query of the tile sees need no mask
                masked = tl.maximum(before + first // GROUP + 1, 0) // BLOCK_N * BLOCK_N
                acc, top, total = _attend(
                    acc,
                    top,
                    total,
                    q,
                    position,
                    k_base,
                    v_base,
                    pages,
                    0,
                    tl.minimum(masked, end),
                    scale,
                    soft_cap,
                    page_stride,
                    slot_stride,
                    DIM,
                    BLOCK_D,
                    BLOCK_N,
                    PAGE,
                    WINDOW,
                    SOFT_CAP,
                    False,
                )
            acc, top, total = _attend(
                acc,
                top,
                total,
                q,
                position,
                k_base,
                v_base,
                pages,
                masked,
                end,
                scale,
                soft_cap,
                page_stride,
                slot_stride,
                DIM,
                BLOCK_D,
                BLOCK_N,
                PAGE,
                WINDOW,
                SOFT_CAP,
                True,
            )
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            where = out + tokens * out_token + head[:, None] * out_head + dim[None, :]
            tl.store(where, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    acc,  # [TILE, BLOCK_D] float32, weighted sum of values
    top,  # [TILE] highest score so far, times log2(e)
    total,  # [TILE] sum of weights
    q,  # [TILE, BLOCK_D]
    position,  # [TILE] of each query
    keys,
    values,
    table,
    begin,  # a multiple of BLOCK_N
    end,
    scale,
    soft_cap,
    page_stride,
    slot_stride,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the keys from `begin` to `end` of one kv head and row."""
    PRECISION: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    dim = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    if SOFT_CAP:
        factor = LOG2E * soft_cap
    else:
        factor = LOG2E * scale
    lowest = tl.min(position, 0)
    # one block ahead: a load whose address comes out of a load of the same turn would not be overlapped
    page = tl.load(table + (begin + lane) // PAGE, mask=begin + lane < end, other=0)
    for start in range(begin, end, BLOCK_N):
        key = start + lane
        offset = (page * page_stride + key % PAGE * slot_stride)[:, None] + dim[None, :]
        ahead = key + BLOCK_N
        page = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
        if MASKED:
            there = key < end
            if WINDOW:
                # pages before the window may be gone
                there = there & (key > lowest - WINDOW)
            inside = there[:, None] & (dim < DIM)[None, :]
            k = tl.load(keys + offset, mask=inside, other=0.0)
            v = tl.load(values + offset, mask=inside, other=0.0)
        elif DIM == BLOCK_D:
            k = tl.load(keys + offset)
            v = tl.load(values + offset)
        else:
            k = tl.load(keys + offset, mask=(dim < DIM)[None, :], other=0.0)
            v = tl.load(values + offset, mask=(dim < DIM)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFT_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), finite at both ends
            score = 1.0 - 2.0 / (tl.exp2(score * (scale / soft_cap * 2.0 * LOG2E)) + 1.0)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * factor)
        base = higher
        if WINDOW:
            # a query may see no key of a block at the window's edge
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * factor - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        top = higher
    return acc, top, total


def _pad(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _check(out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    assert query.shape == out.shape and query.shape[2] == keys.shape[3], f"{query.shape} over {keys.shape}"
    assert query.stride(2) == out.stride(2) == keys.stride(3) == 1, "head dims must be contiguous"
    assert keys.stride() == values.stride(), f"{keys.stride()} is not {values.stride()}"


def _num_programs(device: torch.device, shape: KernelShape, most: int) -> int:
    return min(most, shape.programs_per_sm * _device_facts(device)[0])


@cache
def _device_facts(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory a program may have."""
    if device.type != "cuda":  # the interpreter
        return 2, 232448
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, facts.shared_memory_per_block_optin
