"""Prefill and mixed steps on CUDA: rows of several tokens, split along their queries.

The rows of a tile are (token, query head) pairs of one KV head, so that each key is read once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.attention.cache import FP8
from slipstream.ops.attention.decode import (
    DecodeRows,
    Partials,
    attend_splits,
    decode_shape,
    make_partials,
    queries_at_once,
    serves_single,
)
from slipstream.ops.attention.launch import (
    LOG2E,
    KernelShape,
    attend_keys,
    check_layout,
    head_shape,
    hopper_serves,
    latent_rest,
    launch_strides,
    num_programs,
    pad_dim,
    scale_arguments,
)
from slipstream.ops.attention.tile_list import RECORD, TileList
from slipstream.ops.platform.dispatch import device_limits


def attend_tiles(
    out: torch.Tensor,  # [T, heads, dim]
    query: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    page_table: torch.Tensor,  # [B, width] int64
    tile_list: TileList,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [heads]
    shape: KernelShape | None = None,
) -> None:
    """Causal attention of rows of several tokens; padding tokens get zeros. A `shape` selects the portable kernel of
    this file."""
    dim = out.shape[2]
    page_size, num_kv_heads = keys.shape[1:3]
    check_layout(out, query, keys, values)
    is_plain = not soft_cap and dim == query.shape[2]
    if shape is None and is_plain and _uses_hopper(out, keys):
        from slipstream.ops.attention import hopper_varlen

        programs = min(device_limits(out.device)[0], len(tile_list.tiles) * num_kv_heads)
        hopper_varlen.attend_tiles(out, query, keys, values, page_table, tile_list, scale, programs, window, sinks)
        return
    shape = shape or varlen_shape(dim, keys.element_size(), device_limits(out.device)[1])
    _tile_kernel[(num_programs(out.device, shape, len(tile_list.tiles) * num_kv_heads),)](
        out,
        query,
        keys,
        values,
        page_table,
        tile_list.tiles,
        tile_list.totals,
        sinks,
        scale,
        soft_cap,
        *launch_strides(out, query, page_table),
        *keys.stride()[:3],
        *scale_arguments(keys, values),
        BLOCK_D=pad_dim(dim),
        TILE=shape.tile,
        BLOCK_N=shape.keys,
        WINDOW=window,
        SOFT_CAP=soft_cap > 0,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **head_shape(out, keys),
        **latent_rest(out, query),
    )


def _uses_hopper(out: torch.Tensor, keys: torch.Tensor) -> bool:
    _, page_size, _, dim = keys.shape
    if keys.dtype is FP8:
        return dim in (64, 128) and hopper_serves(out.device, out.dtype, dim, page_size)
    return hopper_serves(out.device, keys.dtype, dim, page_size)


def query_tile(head_dim: int, itemsize: int) -> int:
    """Query rows per tile; a row is one head of one token."""
    if itemsize <= 2:
        return 128 if pad_dim(head_dim) <= 256 else 64  # sums of a tile lie in registers
    # tensor cores do not take full float32: tiles small enough for scalar arithmetic
    return 64 if pad_dim(head_dim) <= 128 else 32


def batch_invariant_shape(values: torch.Tensor) -> KernelShape:
    """The shape of the kernel in this file when it computes all rows (batch-invariant mode)."""
    return varlen_shape(values.shape[3], values.element_size(), device_limits(values.device)[1])


def varlen_shape(head_dim: int, itemsize: int, shared_memory: int) -> KernelShape:
    tile = query_tile(head_dim, itemsize)
    width = pad_dim(head_dim) * itemsize
    keys, stages = (64, 3) if itemsize <= 2 else (32, 2)
    while (tile + 2 * stages * keys) * width > shared_memory and keys > 16:
        if stages > 1:
            stages -= 1
        else:
            keys //= 2
    return KernelShape(keys=keys, warps=8, stages=stages, programs_per_sm=1, tile=tile)


# grid: (k x SMs,) over (tile, kv head); every second round is reversed, so that no program always gets the longer tiles
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table"])
def _tile_kernel(
    out,
    query,
    keys,
    values,
    table,
    tile_records,
    totals,
    sinks,
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
    key_scales,
    value_scales,
    scale_page,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
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
            record = tile_records + tl.cast(item // KV_HEADS, tl.int64) * RECORD
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
            q_base = query + tokens * query_token + head[:, None] * query_head
            q = tl.load(q_base + dim[None, :], mask=mask, other=0.0)
            if REST:
                tail = tl.arange(0, BLOCK_REST)
                after = (token < count)[:, None] & (tail < REST)[None, :]
                q_rest = tl.load(q_base + DIM + tail[None, :], mask=after, other=0.0)
            else:
                q_rest = q

            # position of token 0; padding has length 0, hence no keys
            before = length - count
            position = before + tl.minimum(token, count - 1)
            end = tl.minimum(length, before + (first + TILE - 1) // GROUP + 1)
            top = tl.full([TILE], float("-inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
            if sinks is not None:
                top = tl.load(sinks + head).to(tl.float32) * LOG2E
                total = total + 1.0
            acc = tl.zeros([TILE, BLOCK_D], tl.float32)
            sums = (acc, top, total)
            queries = (q, q_rest, position, scale, soft_cap)
            k_base = keys + kv_head * head_stride
            v_base = values + kv_head * head_stride
            if key_scales is not None:
                scales = (key_scales + kv_head * PAGE, value_scales + kv_head * PAGE, scale_page)
            else:
                scales = (None, None, 0)
            pages = (k_base, v_base, table + row * table_stride, page_stride, slot_stride)
            if WINDOW:
                masked = tl.maximum(before + first // GROUP - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            else:
                # keys visible to every query of the tile need no mask
                masked = tl.maximum(before + first // GROUP + 1, 0) // BLOCK_N * BLOCK_N
                seen = tl.minimum(masked, end)
                sums = attend_keys(
                    sums, queries, pages, scales, 0, seen,
                    DIM, BLOCK_D, REST, BLOCK_REST, BLOCK_N, PAGE, WINDOW, SOFT_CAP, False, WINDOW > 0,
                )  # fmt: skip
            acc, _, total = attend_keys(
                sums, queries, pages, scales, masked, end,
                DIM, BLOCK_D, REST, BLOCK_REST, BLOCK_N, PAGE, WINDOW, SOFT_CAP, True, WINDOW > 0,
            )  # fmt: skip
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            where = out + tokens * out_token + head[:, None] * out_head + dim[None, :]
            tl.store(where, acc.to(out.dtype.element_ty), mask=mask)


__all__ = [
    "DecodeRows",
    "KernelShape",
    "Partials",
    "attend_splits",
    "attend_tiles",
    "batch_invariant_shape",
    "decode_shape",
    "make_partials",
    "queries_at_once",
    "query_tile",
    "serves_single",
    "varlen_shape",
]
