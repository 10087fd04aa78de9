"""Decode on CUDA: rows of one token, cut along their keys.

Query heads that share a key head are rows of one tile, so that each key is read once for all of them. The last split
of a row to be done joins them all, in the order of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slipstream.ops.dependent import dependent, release_next, wait_for_previous
from slipstream.ops.paged_attention.triton.keys import attend_keys
from slipstream.ops.paged_attention.triton.launch import (
    KernelShape,
    check_layout,
    device_facts,
    hopper_serves,
    num_programs,
    pad_dim,
)
from slipstream.ops.paged_attention.work import RECORD, Work


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
    """Rows of one token. Tokens of other rows are left alone. A `shape` asks for the kernel in this file."""
    num_heads, dim = query.shape[1:]
    page_size, num_kv_heads = keys.shape[1:3]
    check_layout(out, query, keys, values)
    group = num_heads // num_kv_heads
    plain = not window and not soft_cap and group <= 64
    if shape is None and plain and hopper_serves(out.device, keys.dtype, dim, page_size):
        from slipstream.ops.paged_attention.triton import hopper_decode

        programs = min(hopper_decode.PROGRAMS_PER_SM * device_facts(out.device)[0], len(work.splits) * num_kv_heads)
        hopper_decode.attend_splits(
            out, query, keys, values, page_table, work, partials.sums, partials.stats, scale, programs
        )
        return
    shape = shape or decode_shape(dim, keys.element_size())
    _split_kernel[(num_programs(out.device, shape, len(work.splits) * num_kv_heads),)](
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
        BLOCK_D=pad_dim(dim),
        TILE=max(16, triton.next_power_of_2(group)),
        BLOCK_N=shape.keys,
        PAGE=page_size,
        WINDOW=window,
        SOFT_CAP=soft_cap > 0,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **dependent(out.device, len(query)),
    )


def decode_shape(head_dim: int, itemsize: int) -> KernelShape:
    width = pad_dim(head_dim) * itemsize  # bytes of one key
    return KernelShape(keys=64 if width <= 256 else 32, warps=4, stages=3 if width <= 512 else 2, programs_per_sm=3)


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
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
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
        acc, top, total = attend_keys(
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
