"""GEMM with quantised weights on tensor cores, for 3 rows and more. Inputs are not quantised.

A program computes outputs x rows: the weights are the left operand, which the tensor cores read from registers, where
the numbers are expanded to the dtype of x. With few rows the weight is split along the inputs, so that enough programs
read it. The shape alone fixes the order of every sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.linear.triton.epilogue import GATES, counters, store_epilogue, weight_rows
from slipstream.ops.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.quantized.matrix import QuantizedMatrix

PROGRAMS = 264  # two for each multiprocessor of an H200


class GemmTile(NamedTuple):
    outputs: int
    rows: int
    bytes: int  # of a weight row per step; 4-bit weights: a segment
    splits: int  # split-k
    warps: int
    stages: int


BATCH_INVARIANT = GemmTile(64, 64, 64, 1, 4, 3)
"""One tile for every number of rows, so that the bits of a row's result do not depend on the batch."""


def quantized_gemm(
    x: torch.Tensor,  # [rows, in]
    weight: QuantizedMatrix,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None = None,
    gate: str = "",
    tile: GemmTile | None = None,
) -> torch.Tensor:
    rows, num_in = x.shape
    num_bytes = weight.values.shape[1]
    num_out = len(weight.values) // 2 if gate else len(weight.values)
    assert x.stride(1) == 1, "rows of x must be contiguous"
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = tile or gemm_tile(rows, len(weight.values), num_bytes)
    step = weight.half or tile.bytes
    steps = triton.cdiv(num_bytes, step)
    split_steps = triton.cdiv(steps, tile.splits)
    splits = triton.cdiv(steps, split_steps)
    blocks, row_blocks = triton.cdiv(len(weight.values), tile.outputs), triton.cdiv(rows, tile.rows)
    partials = arrived = None
    if splits > 1:
        assert row_blocks == 1, "only GEMMs of few rows are split"
        partials = torch.empty((splits, blocks, tile.outputs, tile.rows), dtype=torch.float32, device=x.device)
        arrived = counters(weight.values)
    _gemm_kernel[(row_blocks, blocks, splits)](
        x,
        weight.values,
        weight.scale,
        weight.offset,
        bias,
        out,
        partials,
        arrived,
        rows,
        num_out,
        x.stride(0),
        steps,
        split_steps,
        BYTES=num_bytes,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[1],
        HALF=weight.half,
        ZERO=weight.zero,
        SCALED=weight.scale.shape[1] > 1 or weight.offset is not None,
        GATE=GATES[gate],
        SPLITS=splits,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        STEP=step,
        EVEN=num_bytes % step == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x.device, rows),
    )
    return out


def gemm_tile(rows: int, num_out: int, num_bytes: int) -> GemmTile:
    if rows > 64:
        return GemmTile(128, 128, 64, 1, 8, 3)
    blocks = triton.cdiv(num_out, 64)
    splits = max(1, min(round(PROGRAMS / blocks), 8, num_bytes // 1024))
    return GemmTile(64, max(16, triton.next_power_of_2(rows)), 128, splits, 4, 5 if rows <= 32 else 4)


# grid: (blocks of rows, blocks of outputs, splits)
@triton.jit(do_not_specialize=["num_rows"])
def _gemm_kernel(
    x,
    values,
    scale,
    offset,
    bias,
    out,
    partials,
    arrived,
    num_rows,
    num_out,
    x_stride,
    steps,
    split_steps,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    ZERO: tl.constexpr,
    SCALED: tl.constexpr,
    GATE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    block = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < num_rows)[None, :]
    source, inside = weight_rows(block, num_out, GATE, OUTPUTS)
    source = tl.where(inside, source, 0).to(tl.int64)[:, None]
    k = tl.arange(0, STEP)
    weights = values + source * BYTES + k[None, :]
    inputs = x + row.to(tl.int64)[None, :] * x_stride + k[:, None]
    begin = split * split_steps
    end = tl.minimum(begin + split_steps, steps)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    wait_for_previous(DEPENDENT)
    for step in range(begin, end):
        first = step * STEP
        if EVEN:
            q = tl.load(weights + first)
        else:
            q = tl.load(weights + first, mask=(first + k)[None, :] < BYTES, other=0.0)
        if HALF:
            column = 2 * first
            low = tl.load(inputs + column, mask=there, other=0.0)
            high = tl.load(inputs + column + HALF, mask=there, other=0.0)
            w = _expand((q & 15).to(tl.float32), scale, offset, source, column, GROUP, GROUPS, ZERO, SCALED, STEP, x)
            total = tl.dot(w, low, total, input_precision="ieee")
            w = _expand(
                (q >> 4).to(tl.float32), scale, offset, source, column + HALF, GROUP, GROUPS, ZERO, SCALED, STEP, x
            )
            total = tl.dot(w, high, total, input_precision="ieee")
        else:
            if EVEN:
                part = tl.load(inputs + first, mask=there, other=0.0)
            else:
                part = tl.load(inputs + first, mask=there & ((first + k)[:, None] < BYTES), other=0.0)
            if SCALED or ZERO:
                w = _expand(q.to(tl.float32), scale, offset, source, first, GROUP, GROUPS, ZERO, SCALED, STEP, x)
            else:
                w = q.to(x.dtype.element_ty)
            total = tl.dot(w, part, total, input_precision="ieee")
    is_last = True
    if SPLITS > 1:
        tile = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        blocks = tl.num_programs(1)
        tl.store(partials + (split * blocks + block).to(tl.int64) * (ROWS * OUTPUTS) + tile, total)
        # all threads store their partial sums before one increments the counter
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            total = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for other in tl.static_range(SPLITS):
                start = partials + (other * blocks + block).to(tl.int64) * (ROWS * OUTPUTS)
                total += tl.load(start + tile, cache_modifier=".cg")
            tl.store(arrived + block, 0)
    if is_last:
        if not SCALED:  # one scale for each output
            own, valid = weight_rows(block, num_out, GATE, OUTPUTS)
            total *= tl.load(scale + own, mask=valid, other=0.0)[:, None]
        wide = row.to(tl.int64)
        store_epilogue(tl.trans(total), wide, row < num_rows, bias, out, block, num_out, GATE, ROWS, OUTPUTS)


@triton.jit
def _expand(
    q,
    scale,
    offset,
    source,
    column,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ZERO: tl.constexpr,
    SCALED: tl.constexpr,
    STEP: tl.constexpr,
    x,
):
    """The weights of numbers q [outputs, STEP] from this column on, in the dtype of x."""
    w = q - ZERO
    if SCALED:
        w *= _spread(scale, source, column, GROUP, GROUPS, STEP)
        if offset is not None:
            w -= _spread(offset, source, column, GROUP, GROUPS, STEP)
    return w.to(x.dtype.element_ty)


@triton.jit
def _spread(table, source, column, GROUP: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """Scales or offsets of STEP columns, [outputs, 1] or [outputs, STEP]."""
    first = column // GROUP
    if GROUP >= STEP:
        return tl.load(table + source * GROUPS + first)
    else:
        NUM: tl.constexpr = STEP // GROUP
        at = first + tl.arange(0, NUM)[None, :]
        found = tl.load(table + source * GROUPS + at, mask=at < GROUPS, other=0.0)
        return tl.reshape(tl.broadcast_to(found[:, :, None], (found.shape[0], NUM, GROUP)), (found.shape[0], STEP))
