"""Decode attention on CUDA: rows of one token, split along their keys.

The query heads of a KV head are the rows of one tile, so that each key is read once for all of them. In a step with
drafts the heads of several positions of a row are in one tile. The last split of a row to finish merges all splits of
each query, in key order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slipstream.ops.attention.cache import FP8
from slipstream.ops.attention.launch import (
    LOG2E,
    KernelShape,
    attend_keys,
    check_layout,
    head_shape,
    hopper_serves,
    latent_rest,
    launch_strides,
    pad_dim,
    read_single,
    scale_arguments,
    splits_of_program,
)
from slipstream.ops.attention.tile_list import FEW_ROWS, TileList
from slipstream.ops.platform.dispatch import device_limits
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

SINGLE_DIM, SINGLE_HEADS = 128, 16  # head size, and query heads per KV head, of the kernel for a single row
HOPPER_FP8_HEADS = 16
MAX_ROW_PROGRAMS = 16  # rows
SMALL_HEAD, ONE_SPLIT = 64, 512  # size of a head, and its keys that are not split
MIN_DRAFTED_PROGRAMS = 64  # of rows with drafts, each with one row and KV head
HOPPER_HEADS = 32  # rows of a tile, which are query heads per KV head times queries; more need too many registers


@dataclass(frozen=True, slots=True)
class Partials:
    """Partial results of the splits of a row, which the last split merges."""

    sums: torch.Tensor  # [splits, heads, dim] float32
    stats: torch.Tensor  # [splits, heads, 2] float32: maximum score, sum of weights


def make_partials(tile_list: TileList, num_heads: int, head_dim: int) -> Partials:
    splits, device = tile_list.num_splits, tile_list.singles.device
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
    tile_list: TileList,
    partials: Partials,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [heads]
    shape: KernelShape | None = None,
) -> None:
    """Rows of one token. Output of other rows is not written. A `shape` selects the portable kernel of this file."""
    num_heads, dim = out.shape[1:]
    page_size, num_kv_heads = keys.shape[1:3]
    check_layout(out, query, keys, values)
    group = num_heads // num_kv_heads
    is_plain = not soft_cap and dim == query.shape[2]
    fits = keys.dtype is not FP8 or out.element_size() == 2
    if shape is None and is_plain and fits and _uses_hopper(out.device, keys.dtype, group, dim, page_size):
        from slipstream.ops.attention import hopper_decode

        hopper_decode.attend_splits(
            out, query, keys, values, page_table, tile_list, partials.sums, partials.stats, scale, window, sinks
        )
        return
    shape = shape or decode_shape(dim, keys.element_size())
    _split_kernel[((len(tile_list.shares) - 1) * num_kv_heads,)](
        out,
        query,
        keys,
        values,
        page_table,
        tile_list.singles,
        tile_list.shares,
        tile_list.arrived,
        partials.sums,
        partials.stats,
        sinks,
        scale,
        soft_cap,
        *launch_strides(out, query, page_table),
        *keys.stride()[:3],
        *scale_arguments(keys, values),
        BLOCK_D=pad_dim(dim),
        QUERIES=tile_list.max_queries,
        TILE=max(16, triton.next_power_of_2(group * tile_list.max_queries)),
        BLOCK_N=shape.keys,
        WINDOW=window,
        SOFT_CAP=soft_cap > 0,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **head_shape(out, keys),
        **latent_rest(out, query),
        **dependent(out.device, len(query)),
    )


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of one token of a step, from which follows how many programs compute them."""

    device: torch.device
    dtype: torch.dtype  # of the cache
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_rows: int  # each counted once for all its positions
    window: int = 0  # 0: all keys are visible
    is_plain: bool = True  # without a soft cap, and not of latents
    has_drafts: bool = False  # rows may have several queries

    @property
    def num_programs(self) -> int:
        """The number of shares for the splits of a step: the number of programs that run at once."""
        if self.is_plain and self._uses_hopper():
            from slipstream.ops.attention import hopper_decode

            few = self.has_row_programs or self.num_rows <= FEW_ROWS
            programs = hopper_decode.programs_per_sm(self.head_dim, few, self.dtype is FP8)
        else:
            programs = decode_shape(self.head_dim, self.dtype.itemsize).programs_per_sm
        return max(1, programs * device_limits(self.device)[0] // self.num_kv_heads)

    @property
    def has_row_programs(self) -> bool:
        """Whether programs of one row and KV head each fill the device, which was measured for 16-bit heads of 128:
        then rows up to 1,024 keys are not split, and have no partial results to merge. Those of several queries take
        longer to merge, so fewer programs are enough."""
        is_measured = self.is_plain and not self.window and self.dtype is not FP8 and self.head_dim == 128
        min_rows = FEW_ROWS if self.has_drafts else FEW_ROWS + 1
        if not is_measured or not min_rows <= self.num_rows <= MAX_ROW_PROGRAMS:
            return False
        multiprocessors, programs = device_limits(self.device)[0], self.num_rows * self.num_kv_heads
        min_programs = MIN_DRAFTED_PROGRAMS if self.has_drafts else multiprocessors // 2 + 1
        return min_programs <= programs <= multiprocessors and self._uses_hopper()

    @property
    def one_split(self) -> int:
        """Keys up to which a row is not split; 0: by the number of rows. On an H200 a layer with three KV heads of 64
        takes 0.3 us less at 300 and 500 keys, and 1.9 us less with 5 queries per row; longer rows are faster in splits
        of 256. Other sizes of heads were not measured."""
        return ONE_SPLIT if self.num_rows <= FEW_ROWS and self.head_dim == SMALL_HEAD else 0

    def _uses_hopper(self) -> bool:
        group = self.num_heads // self.num_kv_heads
        return _uses_hopper(self.device, self.dtype, group, self.head_dim, self.page_size)


def queries_at_once(head_dim: int, group: int, wanted: int, *, is_latent: bool) -> int:
    """How many of the `wanted` positions of a row are computed together: their sums must fit into registers. A tile of
    latent attention is full already."""
    lanes = min(HOPPER_HEADS, max(16, 4096 // pad_dim(head_dim)))
    return 1 if is_latent else max(1, min(wanted, lanes // group))


def _uses_hopper(device: torch.device, dtype: torch.dtype, group: int, dim: int, page_size: int) -> bool:
    if dtype is FP8:
        return group <= HOPPER_FP8_HEADS and dim in (64, 128) and hopper_serves(device, torch.bfloat16, dim, page_size)
    return group <= HOPPER_HEADS and hopper_serves(device, dtype, dim, page_size)


def serves_single(query_key: torch.Tensor, value: torch.Tensor, rotary: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether `hopper_single.py` takes a row: query_key [1, heads + kv heads, dim], value [1, kv heads, dim]."""
    num_kv_heads, dim = keys.shape[2:]
    group = query_key.shape[1] // num_kv_heads - 1
    return (
        query_key.dtype is keys.dtype
        and dim == SINGLE_DIM == rotary.shape[-1]
        and group <= SINGLE_HEADS
        and query_key.stride()[1:] == value.stride()[1:] == (dim, 1)
        and hopper_serves(keys.device, keys.dtype, dim, keys.shape[1])
    )


def decode_shape(head_dim: int, itemsize: int) -> KernelShape:
    width = pad_dim(head_dim) * itemsize  # bytes per key
    if width <= 256:
        return KernelShape(keys=64, warps=4, stages=3, programs_per_sm=3)
    if width <= 512:
        # there are no registers for a third program
        return KernelShape(keys=32, warps=4, stages=3, programs_per_sm=2)
    return KernelShape(keys=32 if width <= 1024 else 16, warps=4, stages=2, programs_per_sm=1)


# grid: (shares x kv heads,)
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table"])
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
    QUERIES: tl.constexpr,
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
    kv_head, first, first_split, last, last_split, end = splits_of_program(shares, KV_HEADS)
    query_index = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    k_base = keys + kv_head * head_stride
    v_base = values + kv_head * head_stride
    if key_scales is not None:
        scales = (key_scales + kv_head * PAGE, value_scales + kv_head * PAGE, scale_page)
    else:
        scales = (None, None, 0)
    for single in range(first, end):
        row, token, begin, size, num_splits, first_partial, length, queries, split, stop = read_single(
            singles, single, first, first_split, last, last_split
        )
        if QUERIES == 1:
            queries = 1
        is_query = lane < GROUP * queries
        mask = is_query[:, None] & (dim < DIM)[None, :]
        pages = (k_base, v_base, table + row * table_stride, page_stride, slot_stride)
        position = length - queries + tl.minimum(query_index, queries - 1)
        for index in range(split, stop):
            q_base = query + (token + query_index)[:, None] * query_token + head[:, None] * query_head
            q = tl.load(q_base + dim[None, :], mask=mask, other=0.0)
            if REST:
                tail = tl.arange(0, BLOCK_REST)
                after = is_query[:, None] & (tail < REST)[None, :]
                q_rest = tl.load(q_base + DIM + tail[None, :], mask=after, other=0.0)
            else:
                q_rest = q
            top = tl.full([TILE], float("-inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
            if sinks is not None:
                # the first split of a row begins with the sink, which has no value
                sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2E
                top = tl.where(index == 0, sink, top)
                total = tl.where(index == 0, 1.0, total)
            acc = tl.zeros([TILE, BLOCK_D], tl.float32)
            key = begin + index * size
            key_end = tl.minimum(key + size, length)
            if WINDOW:
                key = tl.maximum(key, tl.maximum(length - queries + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N)
            acc, top, total = attend_keys(
                (acc, top, total), (q, q_rest, position, scale, soft_cap), pages, scales, key, key_end,
                DIM, BLOCK_D, REST, BLOCK_REST, BLOCK_N, PAGE, WINDOW, SOFT_CAP, True, WINDOW > 0 or QUERIES > 1,
            )  # fmt: skip
            if num_splits == 1:
                acc = acc / tl.where(total > 0, total, 1.0)[:, None]
                where = out + (token + query_index)[:, None] * out_token + head[:, None] * out_head + dim[None, :]
                tl.store(where, acc.to(out.dtype.element_ty), mask=mask)
            else:
                partial = (first_partial + query_index * num_splits + index) * (KV_HEADS * GROUP) + head
                tl.store(sums + partial[:, None] * DIM + dim[None, :], acc, mask=mask)
                tl.store(stats + partial * 2, top, mask=is_query)
                tl.store(stats + partial * 2 + 1, total, mask=is_query)
        if (num_splits > 1) & (split < stop):
            # all threads store their partial results before one increments the counter
            tl.debug_barrier()
            counter = arrived + row * KV_HEADS + kv_head
            before = tl.atomic_add(counter, stop - split, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if before + stop - split == num_splits:
                for each in range(queries):
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
    """Merges all splits of a query and kv head into its output, a few at a time, in key order."""
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
        # bypass L1: other multiprocessors wrote these
        tops = tl.load(stats + partial * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats + partial * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        part = tl.load(
            sums + partial[:, :, None] * DIM + dim[None, None, :],
            mask=mask[:, :, None] & (dim < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(top, tl.max(tops, 0))
        # lanes past the group have no maximum
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        weight = tl.exp2(tops - base[None, :])
        total = total * fade + tl.sum(totals * weight, 0)
        acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    mask = (lane < GROUP)[:, None] & (dim < DIM)[None, :]
    tl.store(out + head[:, None] * out_head + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)
