"""GEMV for 1 or 2 rows: bandwidth-bound, so a program loads weights before its input is ready.

The residual add and RMS norm before the product and the gated activation after it are fused. The shape alone fixes the
order of every sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.linear.epilogue import GATES, Norm, store_epilogue, weight_rows
from slipstream.ops.platform.dispatch import multiprocessors
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

MAX_JOINED_ROWS = 2  # more rows have programs of their own


class GemvTile(NamedTuple):
    outputs: int  # weight rows per program
    inputs: int  # columns per load
    warps: int


def gemv(
    x: torch.Tensor,  # [rows, in]
    weight: torch.Tensor,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gate: str = "",
    tile: GemvTile | None = None,
) -> torch.Tensor:
    """Each program reads whole weight rows and multiplies in float32 without tensor cores."""
    rows, num_in = x.shape
    num_out = len(weight) // 2 if gate else len(weight)
    assert weight.stride(1) == 1 and x.stride(1) == 1, "inputs must be contiguous"
    if rows == 1 and tile is None and norm is not None and norm.normed is None:
        persistent = persistent_tile(len(weight), num_in, gate, x.device)
        if persistent is not None:
            return persistent_gemv(x, weight, bias, norm, gate, persistent)
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    each = rows if rows <= MAX_JOINED_ROWS else 1  # rows of a program
    tile = tile or gemv_tile(num_in, gate, len(weight) if norm is not None else 0, each < rows)
    assert norm is None or norm.normed is None or num_in <= tile.inputs
    residual = None if norm is None else norm.residual
    num_programs = triton.cdiv(len(weight), tile.outputs)
    _gemv_kernel[(num_programs, rows // each)](
        x,
        residual,
        None if norm is None else norm.weight,
        weight,
        bias,
        out,
        None if norm is None else norm.total,
        None if norm is None else norm.normed,
        0.0 if norm is None else norm.eps,
        num_out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        weight.stride(0),
        ROWS=each,
        PADDED=triton.next_power_of_2(each),
        IN=num_in,
        GATE=GATES[gate],
        BLOCK_OUT=tile.outputs,
        BLOCK_IN=tile.inputs,
        num_warps=tile.warps,
        **dependent(x.device, rows, num_programs),
    )
    return out


def gemv_tile(num_in: int, gate: str, normed_outputs: int = 0, has_row: bool = False) -> GemvTile:
    """Enough programs to fill the GPU, each with enough bytes in flight; measured with benchmarks/ops/linear.py.
    `normed_outputs`: outputs, if the norm is inside. Each program then reads x, the residual and the norm's weight, so
    programs have more outputs: 13.8 instead of 16.9 us for 12,352 x 2,048 on the H200. `has_row`: a program has one of
    several rows."""
    if num_in <= 1024:
        return GemvTile(4, 1024, 4)
    if has_row:
        return GemvTile(4, 2048, 4)
    if normed_outputs and num_in <= 2048:
        return GemvTile(4, 2048, 4 if normed_outputs >= 8192 else 8)
    return GemvTile(2, 2048, 8) if num_in <= 8192 or gate else GemvTile(1, 1024, 4)


# grid: (blocks of outputs, blocks of rows)
@triton.jit
def _gemv_kernel(
    x,
    residual,
    norm,
    weight,
    bias,
    out,
    total,
    normed,
    eps,
    num_out,
    x_stride,
    residual_stride,
    weight_stride,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    IN: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    x += first_row * x_stride
    out += first_row * num_out
    if residual is not None:
        residual += first_row * residual_stride
        total += first_row * IN
    if normed is not None:
        normed += first_row * IN
    # three dimensions: rows, outputs, inputs
    row = tl.arange(0, PADDED)[:, None, None]
    k = tl.arange(0, BLOCK_IN)[None, None, :]
    source, inside = weight_rows(tl.program_id(0), num_out, GATE, BLOCK_OUT)
    start = weight + source.to(tl.int64)[None, :, None] * weight_stride + k
    inside = inside[None, :, None]
    # weights, also those of the norm, are loaded one block ahead, the first block before x is ready
    w = tl.load(start, mask=inside & (k < IN), other=0.0, eviction_policy="evict_first")
    if norm is not None:
        factors = tl.load(norm + k, mask=k < IN, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    sums = tl.zeros((PADDED, BLOCK_OUT, BLOCK_IN), tl.float32)
    squares = tl.zeros((PADDED, 1, BLOCK_IN), tl.float32)
    kept = squares
    for first in range(0, IN, BLOCK_IN):
        at = first + k
        there = (row < ROWS) & (at < IN)
        following = w
        if IN > BLOCK_IN:
            ahead = first + BLOCK_IN
            following = tl.load(start + ahead, mask=inside & (ahead + k < IN), other=0.0, eviction_policy="evict_first")
        value = tl.load(x + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
        if residual is not None:
            value += tl.load(residual + row * residual_stride + at, mask=there, other=0.0).to(tl.float32)
            rounded = value.to(total.dtype.element_ty)
            tl.store(total + row * IN + at, rounded, mask=there & (tl.program_id(0) == 0))
            value = rounded.to(tl.float32)
        if norm is not None:
            squares += value * value
            value *= factors
            if IN > BLOCK_IN:
                factors = tl.load(norm + at + BLOCK_IN, mask=at + BLOCK_IN < IN, other=0.0).to(tl.float32)
            if normed is not None:
                kept = value
        sums += w.to(tl.float32) * value
        w = following
    result = tl.sum(sums, 2)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(squares, 2) / IN + eps)
        result *= scale
        if normed is not None:
            there = (row < ROWS) & (k < IN) & (tl.program_id(0) == 0)
            tl.store(normed + row * IN + k, (kept * scale[:, :, None]).to(normed.dtype.element_ty), mask=there)
    row = tl.arange(0, PADDED)
    store_epilogue(result, row, row < ROWS, bias, out, tl.program_id(0), num_out, GATE, PADDED, BLOCK_OUT)


# GEMV for one row by as many programs as the GPU runs at once: each has several blocks of outputs.
#
# A program loads the weights of its first two blocks before its input is ready and then always those of two blocks
# ahead, and it computes the norm once. The loop over its blocks is unrolled: in a rolled one, the move of loaded
# weights into the registers of the current block would wait for the load.

MAX_BLOCKS = 8  # of a program: each is code of its own


class PersistentTile(NamedTuple):
    outputs: int  # weight rows per block
    warps: int
    programs: int  # per multiprocessor


def persistent_tile(num_rows: int, num_in: int, gate: str, device: torch.device) -> PersistentTile | None:
    """Of a GEMV with its norm; None: programs with one block are as fast, or it was not measured. `num_rows`: of the
    weight. On the H200 in us, instead of one block: 12,352 x 2,048 12.8 (13.7), 5,120 x 2,048 6.0 (6.9), gated
    12,288 x 2,048 13.0 (13.9), gated 6,144 x 1,024 4.1 (5.6). 12,352 x 2,048 are the input projections of Qwen3-Next:
    in whole steps blocks of two outputs are faster than of four, by 0.4 us."""
    tile: PersistentTile | None = None
    if 1024 < num_in <= 2048:
        if num_rows >= 12288 and not gate:
            tile = PersistentTile(2, 4, 6)
        elif num_rows >= 8192:
            tile = PersistentTile(4, 4, 4)
        elif not gate:
            tile = PersistentTile(2, 4, 5)
    elif gate and 512 < num_in <= 1024:
        tile = PersistentTile(4, 4, 6)
    if tile is None:
        return None
    blocks, programs = triton.cdiv(num_rows, tile.outputs), tile.programs * multiprocessors(device)
    return tile if programs < blocks <= MAX_BLOCKS * programs else None


def persistent_gemv(
    x: torch.Tensor,  # [1, in]
    weight: torch.Tensor,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None,
    norm: Norm,
    gate: str,
    tile: PersistentTile,
) -> torch.Tensor:
    """As `gemv`, for one row with its norm."""
    num_in = x.shape[1]
    num_out = len(weight) // 2 if gate else len(weight)
    assert len(x) == 1 and weight.stride(1) == 1 and x.stride(1) == 1, "one row, and contiguous inputs"
    assert norm.normed is None
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(len(weight), tile.outputs)
    programs = min(blocks, tile.programs * multiprocessors(x.device))
    _persistent_kernel[(programs,)](
        x,
        norm.residual,
        norm.weight,
        weight,
        bias,
        out,
        norm.total,
        norm.eps,
        num_out,
        weight.stride(0),
        IN=num_in,
        GATE=GATES[gate],
        BLOCK_OUT=tile.outputs,
        BLOCK_IN=triton.next_power_of_2(num_in),
        BLOCKS=triton.cdiv(blocks, programs),
        num_warps=tile.warps,
        **dependent(x.device, 1),
    )
    return out


# grid: (programs,): the blocks of a program are as far apart as there are programs
@triton.jit
def _persistent_kernel(
    x,
    residual,
    norm,
    weight,
    bias,
    out,
    total,
    eps,
    num_out,
    weight_stride,
    IN: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCKS: tl.constexpr,  # per program
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    program, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, BLOCK_IN)[None, :]
    there = k < IN
    w = _load_block(weight, weight_stride, program, k, num_out, IN, GATE, BLOCK_OUT)
    following = w
    if BLOCKS > 1:
        following = _load_block(weight, weight_stride, program + programs, k, num_out, IN, GATE, BLOCK_OUT)
    factors = tl.load(norm + k, mask=there, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    value = tl.load(x + k, mask=there, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + k, mask=there, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + k, rounded, mask=there & (program == 0))
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / IN + eps)
    value *= factors
    row = tl.arange(0, 1)
    for number in tl.static_range(BLOCKS):
        block = program + number * programs
        later = following
        if number + 2 < BLOCKS:
            later = _load_block(weight, weight_stride, block + 2 * programs, k, num_out, IN, GATE, BLOCK_OUT)
        result = tl.sum(w.to(tl.float32) * value, 1) * scale
        store_epilogue(result[None, :], row, row < 1, bias, out, block, num_out, GATE, 1, BLOCK_OUT)
        w = following
        following = later


@triton.jit
def _load_block(
    weight, weight_stride, block, k, num_out, IN: tl.constexpr, GATE: tl.constexpr, BLOCK_OUT: tl.constexpr
):
    """The weight rows of a block; nothing is read for blocks past the end."""
    source, inside = weight_rows(block, num_out, GATE, BLOCK_OUT)
    rows = weight + source.to(tl.int64)[:, None] * weight_stride + k
    return tl.load(rows, mask=inside[:, None] & (k < IN), other=0.0, eviction_policy="evict_first")
