"""Host code shared by decode and prefill attention: kernel shapes, launch arguments, device properties."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from slipstream.ops.attention.cache import FP8, scales_of
from slipstream.ops.attention.single_list import SINGLE_RECORD
from slipstream.ops.platform.dispatch import device_limits, has_hopper_kernels


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Compile-time sizes of a kernel."""

    keys: int  # per block
    warps: int
    stages: int
    programs_per_sm: int
    tile: int = 0  # query rows per tile, in the kernel that splits along queries


def pad_dim(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def check_layout(out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    assert query.shape[:2] == out.shape[:2] and query.shape[2] == keys.shape[3], f"{query.shape} over {keys.shape}"
    assert out.shape[2] == values.shape[3], f"{out.shape} of {values.shape}"
    assert query.stride(2) == out.stride(2) == keys.stride(3) == 1, "head dims must be contiguous"
    assert keys.stride() == values.stride(), (
        f"keys and values must have equal strides: {keys.stride()}, {values.stride()}"
    )


def launch_strides(out: torch.Tensor, query: torch.Tensor, page_table: torch.Tensor) -> tuple[int, ...]:
    """Strides of the page table by row, of queries and output by token and head, in the order of the kernels."""
    return (page_table.stride(0), *query.stride()[:2], *out.stride()[:2])


def head_shape(out: torch.Tensor, keys: torch.Tensor) -> dict[str, int]:
    """Compile-time head sizes of all kernels."""
    (_, num_heads, dim), (_, page_size, num_kv_heads, _) = out.shape, keys.shape
    return {"KV_HEADS": num_kv_heads, "GROUP": num_heads // num_kv_heads, "DIM": dim, "PAGE": page_size}


def latent_rest(out: torch.Tensor, query: torch.Tensor) -> dict[str, int]:
    """Of latent attention (MLA): how many elements of a key do not belong to its value, and their padded number."""
    rest = query.shape[2] - out.shape[2]
    return {"REST": rest, "BLOCK_REST": pad_dim(rest) if rest else 0}


def scale_arguments(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Scales of keys and values of an FP8 cache, [pages, page_size, kv heads], and the stride of their pages."""
    if keys.dtype is not FP8:
        return None, None, 0
    key_scales = scales_of(keys)
    return key_scales, scales_of(values), key_scales.stride(0)


def num_programs(device: torch.device, shape: KernelShape, most: int) -> int:
    return min(most, shape.programs_per_sm * device_limits(device)[0])


@cache
def hopper_serves(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> bool:
    """Whether the Hopper kernels take such heads on this device."""
    return (
        has_hopper_kernels(device)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128, 256)
        and 8 <= page_size <= 256
        and page_size.bit_count() == 1
    )


# The share of a program: consecutive splits of rows of one token.
#
# As many programs as there are kv heads compute one share. They run in parallel and read the same pages, each its own
# head.


@triton.jit
def splits_of_program(shares, KV_HEADS: tl.constexpr):
    """The kv head of this program; its first single and split; the first single and split of the next share; the end of
    its own singles."""
    share = shares + tl.program_id(0) // KV_HEADS * 2
    first = tl.load(share)
    split = tl.load(share + 1)
    last = tl.load(share + 2)
    stop = tl.load(share + 3)
    return tl.program_id(0) % KV_HEADS, first, split, last, stop, last + tl.where(stop > 0, 1, 0)


@triton.jit
def read_single(singles, single, first, split, last, stop):
    """Row, token, first key, keys per split, number of splits, index of the first partial result, length, number of
    queries; and the range of splits in this share."""
    record = singles + tl.cast(single, tl.int64) * SINGLE_RECORD
    num_splits = tl.load(record + 4)
    return (
        tl.load(record).to(tl.int64),
        tl.load(record + 1).to(tl.int64),
        tl.load(record + 2),
        tl.load(record + 3),
        num_splits,
        tl.load(record + 5).to(tl.int64),
        tl.load(record + 6),
        tl.load(record + 8),
        tl.where(single == first, split, 0),
        tl.where(single == last, stop, num_splits),
    )


# Online softmax over the keys of one row and kv head, block by block: page lookup, masks, running sums.
#
# Weights are exp2 of float32 scores, with the scale folded in.

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    sums,  # so far: weighted sum of values [TILE, BLOCK_D], highest score [TILE] times log2(e), sum of weights [TILE]
    queries,  # [TILE, BLOCK_D], the rest of them [TILE, BLOCK_REST], their positions [TILE], scale and soft cap
    pages,  # keys and values of the kv head, page table of the row, strides of a page and of a slot
    scales,  # of keys and values in FP8: of the kv head, and their strides of a page and of a slot; else None
    begin,  # a multiple of BLOCK_N
    end,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    MAYBE_UNSEEN: tl.constexpr,
):
    """The sums after the keys from `begin` to `end` of one kv head and row. With a REST, a key has that many numbers
    after the DIM elements that are also its value. With MAYBE_UNSEEN a query may see no key of a block."""
    acc, top, total = sums
    q, q_rest, position, scale, soft_cap = queries
    keys, values, table, page_stride, slot_stride = pages
    key_scales, value_scales, scale_page = scales
    PRECISION: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    dim = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    if SOFT_CAP:
        factor = LOG2E * soft_cap
    else:
        factor = LOG2E * scale
    lowest = tl.min(position, 0)
    # page numbers are loaded one block ahead: a load that depends on a load of the same iteration is not pipelined
    page = tl.load(table + (begin + lane) // PAGE, mask=begin + lane < end, other=0)
    for start in range(begin, end, BLOCK_N):
        key = start + lane
        slot = page * page_stride + key % PAGE * slot_stride
        offset = slot[:, None] + dim[None, :]
        scale_at = page * scale_page + key % PAGE
        ahead = key + BLOCK_N
        page = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
        if MASKED:
            there = key < end
            if WINDOW:
                # pages before the window may be freed
                there = there & (key > lowest - WINDOW)
            inside = there[:, None] & (dim < DIM)[None, :]
            k = tl.load(keys + offset, mask=inside, other=0.0)
        elif DIM == BLOCK_D:
            k = tl.load(keys + offset)
        else:
            k = tl.load(keys + offset, mask=(dim < DIM)[None, :], other=0.0)
        if REST:
            v = k
        elif MASKED:
            v = tl.load(values + offset, mask=inside, other=0.0)
        elif DIM == BLOCK_D:
            v = tl.load(values + offset)
        else:
            v = tl.load(values + offset, mask=(dim < DIM)[None, :], other=0.0)
        if key_scales is not None:
            is_visible = key < end
            if WINDOW:
                is_visible = is_visible & (key > lowest - WINDOW)
            k, v = k.to(q.dtype), v.to(q.dtype)
            key_scale = tl.load(key_scales + scale_at, mask=is_visible, other=0.0)
            value_scale = tl.load(value_scales + scale_at, mask=is_visible, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if key_scales is not None:
            score *= key_scale[None, :]
        if REST:
            tail = tl.arange(0, BLOCK_REST)
            after = (key < end)[:, None] & (tail < REST)[None, :]
            k_rest = tl.load(keys + slot[:, None] + (DIM + tail)[None, :], mask=after, other=0.0)
            score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision=PRECISION)
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
        if MAYBE_UNSEEN:
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * factor - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        if value_scales is not None:
            weight *= value_scale[None, :]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        top = higher
    return acc, top, total
