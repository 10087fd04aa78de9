"""Shared by the Triton GEMMs with quantised weights: numbers of one step become an operand of the tensor cores.

The launcher chooses what a scale multiplies (`scaling_of`): each number, the sums of a group, or the sums of a row. A
step of 4-bit numbers has two halves, the low and the high bits of its bytes (`ops/quantized/matrix.py`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from slipstream.ops.quantized.matrix import QuantizedMatrix

EACH, GROUP_SUMS, ROW_SUMS = 0, 1, 2  # what a scale multiplies
_EACH, _GROUP_SUMS, _ROW_SUMS = tl.constexpr(EACH), tl.constexpr(GROUP_SUMS), tl.constexpr(ROW_SUMS)


def step_of(weight: QuantizedMatrix, num_bytes: int, has_fp8_inputs: bool) -> int:
    """Bytes of a weight row per step; `num_bytes`: wanted, for weights of 8 bits. With FP8 inputs the weights stay FP8,
    so that scales must multiply sums: a step lies within a group."""
    if has_fp8_inputs and weight.scale.shape[1] > 1:
        return min(num_bytes, weight.group)
    if not weight.is_4_bit:
        return num_bytes
    # a segment of 4-bit numbers if it lies within a group: then scales multiply sums
    return weight.half if weight.half == 64 and weight.group >= 64 else 64


def scaling_of(weight: QuantizedMatrix, step: int) -> int:
    if weight.minima is not None:
        return EACH
    if weight.scale.shape[1] == 1:
        return ROW_SUMS
    return GROUP_SUMS if min(weight.group, weight.half or step) == step else EACH


def constants_of(weight: QuantizedMatrix, step: int) -> dict[str, Any]:
    """Arguments of a kernel that calls `add_step`."""
    num_bytes = weight.values.shape[1]
    return dict(
        BYTES=num_bytes,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[1],
        HALF=weight.half,
        ZERO=weight.zero,
        STEP=step,
        RUN=min(weight.group, weight.half or step),
        SCALING=scaling_of(weight, step),
        EVEN=num_bytes % step == 0,
    )


@triton.jit
def first_columns(STEP: tl.constexpr, HALF: tl.constexpr):
    """The column of each byte of a step, or of its low bits, relative to the step's first column."""
    k = tl.arange(0, STEP)
    if HALF and HALF < STEP:
        return tl.max_contiguous(tl.multiple_of(k + k // HALF * HALF, HALF), HALF)
    else:
        return k


@triton.jit
def load_numbers(weights, first, STEP: tl.constexpr, BYTES: tl.constexpr, EVEN: tl.constexpr):
    """Bytes [outputs, STEP] from byte `first` of the rows; 0 after their end."""
    if EVEN:
        return tl.load(weights + first)
    else:
        return tl.load(weights + first, mask=(first + tl.arange(0, STEP))[None, :] < BYTES, other=0.0)


@triton.jit
def load_inputs(inputs, first, offset, there, STEP: tl.constexpr, BYTES: tl.constexpr, EVEN: tl.constexpr):
    """Inputs [STEP, rows] of the bytes from `first` on, `offset` columns after `inputs`; 0 after the last column."""
    if EVEN:
        return tl.load(inputs + offset, mask=there, other=0.0)
    else:
        return tl.load(inputs + offset, mask=there & ((first + tl.arange(0, STEP))[:, None] < BYTES), other=0.0)


@triton.jit
def add_step(
    total,
    q,
    x,
    row,
    column,
    scale,
    zeros,
    minima,
    codebook,
    IS_4_BIT: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    SCALING: tl.constexpr,
):
    """total [outputs, rows] after the numbers q [outputs, STEP] and inputs x [STEP, rows].

    `row` [outputs, 1]: index of each output's first entry in the tables; `column`: of the first number; RUN: adjacent
    columns of a step that share a scale.
    """
    if SCALING == _EACH:
        if codebook is None:
            w = q.to(tl.float32)
        else:
            w = tl.load(codebook + q)
        if zeros is not None:
            w = w - _spread(zeros, row, column, GROUP, GROUPS, HALF, RUN, STEP)
        elif ZERO:
            w = w - ZERO
        w = w * _spread(scale, row, column, GROUP, GROUPS, HALF, RUN, STEP)
        if minima is not None:
            w = w + _spread(minima, row, column, GROUP, GROUPS, HALF, RUN, STEP)
        return tl.dot(w.to(x.dtype), x, total, input_precision="ieee")
    else:
        entry = row + column // GROUP
        if codebook is not None:
            w = tl.load(codebook + q)
        elif q.dtype == x.dtype:
            w = q
        elif IS_4_BIT and x.dtype == tl.bfloat16:
            # 4 bits below those of 128: the bfloat16 128 + q, exact
            w = (q.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
            if zeros is not None:
                w = w - (tl.load(zeros + entry) + 128.0).to(tl.bfloat16)
            else:
                w = w - (ZERO + 128.0)
        else:
            w = q.to(x.dtype)
            if zeros is not None:
                w = w - tl.load(zeros + entry).to(x.dtype)
            elif ZERO:
                w = w - ZERO
        if SCALING == _ROW_SUMS:
            return tl.dot(w.to(x.dtype), x, total, input_precision="ieee")
        else:
            sums = tl.dot(w.to(x.dtype), x, input_precision="ieee")
            return total + sums * tl.load(scale + entry).to(tl.float32)


@triton.jit
def _spread(
    table,
    row,
    column,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
):
    """The entry of each number of a step in a table, [outputs, STEP] float32."""
    NUM: tl.constexpr = STEP // RUN
    first = tl.arange(0, NUM) * RUN
    if HALF and HALF < STEP:
        first += first // HALF * HALF
    entry = ((column + first) // GROUP)[None, :]
    # the last step of a row may reach past its groups, and past the table
    found = tl.load(table + row + entry, mask=entry < GROUPS, other=0.0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(found[:, :, None], (found.shape[0], NUM, RUN)), (found.shape[0], STEP))
