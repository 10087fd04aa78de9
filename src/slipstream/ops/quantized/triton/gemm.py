"""GEMM with quantised weights on tensor cores, for any number of rows.

A program computes outputs x rows, with the weights as the left operand. FP8 weights and FP8 inputs go from shared
memory to the tensor cores as they are. Other numbers are expanded to the dtype of x in registers (`expand.py`). With
few rows the weight is split along the inputs, so that enough programs read it. The shape alone fixes the order of every
sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.linear.triton.epilogue import GATES, counters, store_epilogue, weight_rows
from slipstream.ops.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.quantized.matrix import QuantizedMatrix
from slipstream.ops.quantized.triton.expand import (
    ROW_SUMS,
    add_halves,
    add_step,
    constants_of,
    first_columns,
    load_factor,
    load_inputs,
    load_numbers,
    step_of,
)

_ROW_SUMS = tl.constexpr(ROW_SUMS)
PROGRAMS = 264  # two for each multiprocessor of an H200


class GemmTile(NamedTuple):
    outputs: int
    rows: int
    bytes: int  # of a weight row per step; weights of 4 bits: `step_of`
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
    x_scale: torch.Tensor | None = None,  # [rows, 1] of FP8 inputs
    dtype: torch.dtype | None = None,  # of the output; default: that of x
) -> torch.Tensor:
    rows, num_bytes = len(x), weight.values.shape[1]
    num_out = len(weight.values) // 2 if gate else len(weight.values)
    assert x.stride(1) == 1, "rows of x must be contiguous"
    out = torch.empty((rows, num_out), dtype=dtype or x.dtype, device=x.device)
    if not rows:
        return out
    tile = tile or gemm_tile(rows, len(weight.values), num_bytes, is_4_bit=weight.is_4_bit, is_fp8=x_scale is not None)
    step = step_of(weight, tile.bytes, x_scale is not None)
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
        x_scale,
        weight.values,
        weight.scale,
        weight.zeros,
        weight.minima,
        weight.codebook,
        bias,
        out,
        partials,
        arrived,
        rows,
        num_out,
        x.stride(0),
        steps,
        split_steps,
        GATE=GATES[gate],
        SPLITS=splits,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        **constants_of(weight, step, x),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x.device, rows),
    )
    return out


def gemm_tile(rows: int, num_out: int, num_bytes: int, *, is_4_bit: bool, is_fp8: bool = False) -> GemmTile:
    """`is_fp8`: of inputs in FP8. Measured on an H200 at the shapes of Qwen3-8B with 1 and 16 rows."""
    if rows > 64:
        return GemmTile(128, 128, 128 if is_fp8 else 64, 1, 8, 3)
    padded = max(16, triton.next_power_of_2(rows))
    if is_4_bit:
        outputs, programs, most = (128 if num_out >= 4096 else 64), 2 * PROGRAMS, 16
    else:
        outputs, programs, most = 64, PROGRAMS, 8
    splits = max(1, min(round(programs / triton.cdiv(num_out, outputs)), most, num_bytes // 256))
    return GemmTile(outputs, padded, 256 if is_fp8 and rows <= 16 else 128, splits, 4, 4)


# grid: (blocks of rows, blocks of outputs, splits)
@triton.jit(do_not_specialize=["num_rows"])
def _gemm_kernel(
    x,
    x_scale,
    values,
    scale,
    zeros,
    minima,
    codebook,
    bias,
    out,
    partials,
    arrived,
    num_rows,
    num_out,
    x_stride,
    steps,
    split_steps,
    GATE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    ZERO: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    SCALING: tl.constexpr,
    EVEN: tl.constexpr,
    FP4: tl.constexpr,
    PTX: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    block = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < num_rows)[None, :]
    source, inside = weight_rows(block, num_out, GATE, OUTPUTS)
    source = tl.where(inside, source, 0).to(tl.int64)[:, None]
    weights = values + source * BYTES + tl.arange(0, STEP)[None, :]
    inputs = x + row.to(tl.int64)[None, :] * x_stride + first_columns(STEP, HALF)[:, None]
    table = source * GROUPS
    begin = split * split_steps
    end = tl.minimum(begin + split_steps, steps)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    COLUMNS: tl.constexpr = 2 * STEP if HALF else STEP  # of a step
    ahead = load_factor(scale, table, begin * COLUMNS, GROUP, GROUPS, SCALING)
    ahead_high = ahead
    if HALF and GROUP < 2 * HALF:
        ahead_high = load_factor(scale, table, begin * COLUMNS + HALF, GROUP, GROUPS, SCALING)
    wait_for_previous(DEPENDENT)
    for step in range(begin, end):
        first = step * STEP
        factor = ahead
        ahead = load_factor(scale, table, (step + 1) * COLUMNS, GROUP, GROUPS, SCALING)
        factor_high = factor
        if HALF and GROUP < 2 * HALF:
            factor_high = ahead_high
            ahead_high = load_factor(scale, table, (step + 1) * COLUMNS + HALF, GROUP, GROUPS, SCALING)
        q = load_numbers(weights, first, STEP, BYTES, EVEN)
        if HALF:
            column = 2 * first
            low = load_inputs(inputs, first, column, there, STEP, BYTES, EVEN)
            high = load_inputs(inputs, first, column + HALF, there, STEP, BYTES, EVEN)
            total = add_halves(
                total, q, low, high, table, column, factor, factor_high, scale, zeros, minima, codebook,
                ZERO, GROUP, GROUPS, HALF, RUN, STEP, SCALING, FP4, PTX,
            )  # fmt: skip
        else:
            part = load_inputs(inputs, first, first, there, STEP, BYTES, EVEN)
            total = add_step(
                total, q, part, table, first, factor, scale, zeros, minima, codebook,
                ZERO, GROUP, GROUPS, HALF, RUN, STEP, SCALING, FP4,
            )  # fmt: skip
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
        if SCALING == _ROW_SUMS:
            own, valid = weight_rows(block, num_out, GATE, OUTPUTS)
            total *= tl.load(scale + own, mask=valid, other=0.0).to(tl.float32)[:, None]
        if x_scale is not None:
            total *= tl.load(x_scale + row, mask=row < num_rows, other=0.0)[None, :]
        wide = row.to(tl.int64)
        store_epilogue(tl.trans(total), wide, row < num_rows, bias, out, block, num_out, GATE, ROWS, OUTPUTS)
