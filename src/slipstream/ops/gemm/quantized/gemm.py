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

from slipstream.ops.gemm.linear.epilogue import GATES, counters, store_epilogue, weight_rows
from slipstream.ops.gemm.quantized.expand import (
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
from slipstream.ops.gemm.quantized.matrix import MAX_FP8, QuantizedMatrix
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

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


# Quantises rows of activations to FP8, with a scale for each row.
#
# The RMS norm or the gated activation before may be part of the pass; its result is rounded to the dtype of x, as on
# its way through memory.

_MAX = tl.constexpr(MAX_FP8)
MAX_FORWARD_ROWS = 2048  # of more rows the last are the first: the kernel before left them in the L2 cache
MAX_WIDE_ROWS = 512  # up to so many rows all programs of 16 warps run at once, four on a multiprocessor


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    return _launch(x, None, None, None, 0.0, scale)


def quantize_normed_rows(
    x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 and scales of the RMS norm of x + residual, and the sum. x may be partial sums [splits, rows, size] in
    float32, if there is a residual."""
    if residual is None:
        return *_launch(x, None, norm, None, eps, scale), x
    total = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    return *_launch(x, residual.contiguous(), norm, total, eps, scale), total


def quantize_gated_rows(
    gate_up: torch.Tensor, gate: str, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 and scales of the gated activation of rows of gate columns, then up columns."""
    return _launch(gate_up, None, None, None, 0.0, scale, gate)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    total: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    gate: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = x.shape[-2], x.shape[-1] // (2 if gate else 1)
    assert x.stride(-1) == 1, "rows of x must be contiguous"
    out = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        _quantize_kernel[(rows,)](
            x,
            residual,
            norm,
            scale,
            out,
            total,
            scales,
            eps,
            x.stride(-2),
            x.stride(0),
            PARTS=len(x) if x.dim() == 3 else 1,
            GATE=GATES[gate],
            SIZE=size,
            BLOCK=block,
            REVERSED=rows > MAX_FORWARD_ROWS,
            num_warps=_num_warps(rows, block),
            **dependent(x.device, rows),
        )
    return out, scales


def _num_warps(rows: int, block: int) -> int:
    """A pass over few rows takes the latency of its loads and of sums over the row, which are shorter with 8 numbers
    per thread."""
    if rows <= MAX_WIDE_ROWS:
        return min(16, max(4, block // 256))
    return 4 if block <= 4096 else 8


# grid: (rows,)
@triton.jit
def _quantize_kernel(
    x,
    residual,
    norm,
    given,
    out,
    total,
    scales,
    eps,
    x_stride,
    part_stride,
    PARTS: tl.constexpr,  # sums of x
    GATE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSED: tl.constexpr,  # the last rows first
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if REVERSED:
        row = tl.num_programs(0) - 1 - row
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    if norm is not None:  # older than the step
        factor = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + part * part_stride + row * x_stride + column, mask=inside, other=0.0)
    if GATE:
        up = tl.load(x + row * x_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
        slope = value
        if GATE == 2:
            # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
            slope = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = (value * tl.sigmoid(slope) * up).to(x.dtype.element_ty).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * SIZE + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if norm is not None:
        KIND: tl.constexpr = norm.dtype.element_ty if PARTS > 1 else x.dtype.element_ty
        weighted = value * factor
        # both at once: each is a barrier of the program
        square, most = tl.reduce((value * value, tl.abs(weighted)), 0, _sum_and_max)
        root = tl.rsqrt(square / SIZE + eps)
        value = (weighted * root).to(KIND).to(tl.float32)
        most = (most * root).to(KIND).to(tl.float32)  # the largest is the same after any rounding
    elif given is None:
        most = tl.max(tl.abs(value), 0)
    if given is None:
        scale = tl.maximum(most / _MAX, 1e-12)
    else:
        scale = tl.load(given)
    tl.store(scales + row, scale)
    value = tl.minimum(tl.maximum(value * (1 / scale), -_MAX), _MAX)
    tl.store(out + row * SIZE + column, value.to(tl.float8e4nv), mask=inside)


@triton.jit
def _sum_and_max(sum1, max1, sum2, max2):
    return sum1 + sum2, tl.maximum(max1, max2)
