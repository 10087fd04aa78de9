"""Skinny GEMM for 3 to 32 rows on tensor cores, for GPUs without `streaming_hopper.py`.

Rows are padded to 16 or 32, which costs no time while the weight is read. The shape alone fixes the order of every sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.linear.epilogue import GATES, Norm, counters, store_epilogue, weight_rows
from slipstream.ops.gemm.linear.gemv import GemvTile, gemv
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous


class SkinnyTile(NamedTuple):
    outputs: int
    inputs: int
    splits: int  # split-k
    warps: int  # each sums a part of the inputs of a block
    stages: int


def skinny_mma(
    x: torch.Tensor,  # [rows, in], up to 32 rows
    weight: torch.Tensor,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None = None,
    gate: str = "",
    tile: SkinnyTile | None = None,
) -> torch.Tensor:
    rows, num_in = x.shape
    num_out = len(weight) // 2 if gate else len(weight)
    assert weight.stride(1) == 1 and x.stride(1) == 1, "inputs must be contiguous"
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    tile = tile or skinny_tile(num_in)
    blocks = triton.cdiv(len(weight), tile.outputs)
    split = triton.cdiv(triton.cdiv(num_in, tile.splits), tile.inputs) * tile.inputs
    padded = 16 if rows <= 16 else 32
    partials = arrived = None
    if tile.splits > 1:
        partials = torch.empty((tile.splits, blocks, padded, tile.outputs), dtype=torch.float32, device=x.device)
        arrived = counters(weight)
        assert blocks <= len(arrived), f"{blocks} blocks of outputs, but {len(arrived)} counters"
    _skinny_mma_kernel[(blocks, tile.splits)](
        x,
        weight,
        bias,
        out,
        partials,
        arrived,
        rows,
        num_out,
        num_in,
        split,
        x.stride(0),
        weight.stride(0),
        GATE=GATES[gate],
        SPLITS=tile.splits,
        EVEN=num_in % (tile.splits * tile.inputs) == 0,
        WHOLE=split == tile.inputs,
        PARTS=tile.warps,
        BLOCK_ROWS=padded,
        BLOCK_OUT=tile.outputs,
        BLOCK_IN=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x.device, rows),
    )
    return out


def skinny_tile(num_in: int) -> SkinnyTile:
    """A program holds all its weights in registers."""
    if num_in <= 1024:
        return SkinnyTile(16, 1024, 1, 4, 1)
    if num_in <= 2048:
        return SkinnyTile(16, 2048, 1, 8, 1)
    return SkinnyTile(16, 1024, triton.cdiv(num_in, 1024), 4, 1)


# grid: (blocks of outputs, splits)
@triton.jit
def _skinny_mma_kernel(
    x,
    weight,
    bias,
    out,
    partials,
    arrived,
    num_rows,
    num_out,
    num_in,
    split_size,
    x_stride,
    weight_stride,
    GATE: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    block = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_ROWS)
    there = (row < num_rows)[None, :, None]
    source, inside = weight_rows(block, num_out, GATE, BLOCK_OUT)
    source = tl.where(inside, source, 0)
    begin = split * split_size
    end = tl.minimum(begin + split_size, num_in)
    # three dimensions: each warp sums its part of the inputs for all outputs
    SHARE: tl.constexpr = BLOCK_IN // PARTS
    k = begin + tl.arange(0, PARTS)[:, None, None] * SHARE + tl.arange(0, SHARE)[None, None, :]
    weights = weight + source.to(tl.int64)[None, :, None] * weight_stride + k
    rows = x + row.to(tl.int64)[None, :, None] * x_stride + k
    total = tl.zeros((PARTS, BLOCK_ROWS, BLOCK_OUT), tl.float32)
    if WHOLE:
        # loads all weights of this program before x is ready
        right = tl.load(weights, mask=k < end, other=0.0, eviction_policy="evict_first")
        wait_for_previous(DEPENDENT)
        left = tl.load(rows, mask=there & (k < end), other=0.0)
        total = tl.dot(left, tl.trans(right, (0, 2, 1)), total, input_precision="ieee")
    else:
        wait_for_previous(DEPENDENT)
        for first in range(0, end - begin, BLOCK_IN):
            if EVEN:
                left = tl.load(rows + first, mask=there, other=0.0)
                right = tl.load(weights + first)
            else:
                left = tl.load(rows + first, mask=there & (first + k < end), other=0.0)
                right = tl.load(weights + first, mask=first + k < end, other=0.0)
            total = tl.dot(left, tl.trans(right, (0, 2, 1)), total, input_precision="ieee")
    total = tl.sum(total, 0)
    if SPLITS > 1:
        lane = tl.arange(0, BLOCK_OUT)
        tile = row[:, None] * BLOCK_OUT + lane[None, :]
        blocks = tl.num_programs(0)
        tl.store(partials + (split * blocks + block).to(tl.int64) * (BLOCK_ROWS * BLOCK_OUT) + tile, total)
        # all threads store their partial sums before one increments the counter
        tl.debug_barrier()
        before = tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if before == SPLITS - 1:
            total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
            for other in tl.static_range(SPLITS):
                start = partials + (other * blocks + block).to(tl.int64) * (BLOCK_ROWS * BLOCK_OUT)
                total += tl.load(start + tile, cache_modifier=".cg")
            store_epilogue(total, row, row < num_rows, bias, out, block, num_out, GATE, BLOCK_ROWS, BLOCK_OUT)
            tl.store(arrived + block, 0)
    else:
        store_epilogue(total, row, row < num_rows, bias, out, block, num_out, GATE, BLOCK_ROWS, BLOCK_OUT)


# Batch-invariant GEMM on CUDA: the bits of a row's result do not depend on the other rows of the batch.
#
# cuBLAS selects another kernel, with another order of sums, for another number of rows. This kernel is used for every
# number of rows: each output tile accumulates along the whole input in the same steps.


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times the transpose of weight [out, in], in bfloat16, float16 or float32."""
    assert weight.is_contiguous()
    return _multiply(x.contiguous().unsqueeze(1), weight.unsqueeze(0), bias).squeeze(1)


def batch_invariant_heads(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, in], each head by the transpose of its weight, [heads, out, in] of any strides, to
    [rows, heads, out]."""
    return _multiply(x if x.stride(2) == 1 else x.contiguous(), weights, None)


def _multiply(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    num_rows, num_heads, size = x.shape
    num_out = weights.shape[1]
    assert weights.shape == (num_heads, num_out, size) and weights.dtype is x.dtype
    out = torch.empty(num_rows, num_heads, num_out, dtype=x.dtype, device=x.device)
    if num_rows:
        tiles = triton.cdiv(num_rows, 64) * triton.cdiv(num_out, 64)
        block_in = 64 if x.element_size() == 2 else 32
        _batch_invariant_kernel[(tiles, num_heads)](
            x, weights, bias, out, num_rows, num_out, *x.stride()[:2], *weights.stride(), num_heads * num_out,
            SIZE=size, BLOCK_IN=block_in, num_warps=4, num_stages=4,
        )  # fmt: skip
    return out


# grid: (row tiles x output tiles, heads), tiles of 64; the row tiles of one output tile are adjacent, to share its
# weights
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x", "out"])
def _batch_invariant_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    x_row,
    x_head,
    weight_head,
    weight_out,
    weight_in,
    out_row,
    SIZE: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    ROWS: tl.constexpr = 64
    OUTS: tl.constexpr = 64
    PRECISION: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    row_tiles = tl.cdiv(num_rows, ROWS)
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    output = tile // row_tiles * OUTS + tl.arange(0, OUTS)
    lane = tl.arange(0, BLOCK_IN)
    x_rows = x + head * x_head + row.to(tl.int64)[:, None] * x_row
    w_rows = weight + head * weight_head + output.to(tl.int64)[:, None] * weight_out
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for first in range(0, SIZE, BLOCK_IN):
        column = first + lane
        inside = (column < SIZE)[None, :]
        a = tl.load(x_rows + column[None, :], mask=(row < num_rows)[:, None] & inside, other=0.0)
        w = tl.load(w_rows + column[None, :] * weight_in, mask=(output < num_out)[:, None] & inside, other=0.0)
        total = tl.dot(a, tl.trans(w), total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + output, mask=output < num_out, other=0.0).to(tl.float32)[None, :]
    where = out + head * num_out + row.to(tl.int64)[:, None] * out_row + output[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (output < num_out)[None, :])


__all__ = ["GemvTile", "Norm", "SkinnyTile", "gemv", "skinny_mma"]
