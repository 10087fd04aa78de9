"""GEMV for one row by as many programs as the GPU runs at once: each has several blocks of outputs.

A program loads the weights of its first two blocks before its input is ready and then always those of two blocks
ahead, and it computes the norm once. The loop over its blocks is unrolled: in a rolled one, the move of loaded weights
into the registers of the current block would wait for the load.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.device_limits import multiprocessors
from slipstream.ops.linear.triton.epilogue import GATES, Norm, store_epilogue, weight_rows
from slipstream.ops.pdl import dependent, release_next, wait_for_previous

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
