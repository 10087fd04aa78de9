"""Dequantises a whole weight on a GPU, for GEMMs of many rows by the kernels for unquantised weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.quantized.matrix import QuantizedMatrix
from slipstream.ops.quantized.triton.expand import constants_of, first_columns, load_numbers, number_of

STEP = 128  # bytes of a row per program
ROWS = 32


def dequantize(weight: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """As the reference."""
    num_rows, num_bytes = weight.values.shape
    out = torch.empty((num_rows, weight.num_columns), dtype=dtype, device=weight.values.device)
    constants = constants_of(weight, STEP, out)
    for name in ("SCALING", "PTX"):
        del constants[name]
    _dequantize_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_bytes, STEP))](
        weight.values,
        weight.scale,
        weight.zeros,
        weight.minima,
        weight.codebook,
        out,
        num_rows,
        ROWS=ROWS,
        **constants,
        num_warps=4,
    )
    return out


# grid: (blocks of rows, steps of a row)
@triton.jit
def _dequantize_kernel(
    values,
    scale,
    zeros,
    minima,
    codebook,
    out,
    num_rows,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    ZERO: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
    FP4: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None]
    source = tl.where(row < num_rows, row, 0).to(tl.int64)[:, None]
    first = tl.program_id(1) * STEP
    q = load_numbers(values + source * BYTES + tl.arange(0, STEP)[None, :], first, STEP, BYTES, EVEN)
    if not EVEN:
        mask = mask & ((first + tl.arange(0, STEP)) < BYTES)[None, :]
    table = source * GROUPS
    if HALF:
        column = 2 * first
        target = out + source * (2 * BYTES) + column + first_columns(STEP, HALF)[None, :]
        low = number_of(
            q & 15, table, column, scale, zeros, minima, codebook, ZERO, GROUP, GROUPS, HALF, RUN, STEP, FP4
        )
        tl.store(target, low.to(out.dtype.element_ty), mask=mask)
        high = number_of(
            q >> 4, table, column + HALF, scale, zeros, minima, codebook, ZERO, GROUP, GROUPS, HALF, RUN, STEP, FP4
        )
        tl.store(target + HALF, high.to(out.dtype.element_ty), mask=mask)
    else:
        number = number_of(q, table, first, scale, zeros, minima, codebook, ZERO, GROUP, GROUPS, HALF, RUN, STEP, FP4)
        target = out + source * BYTES + first + tl.arange(0, STEP)[None, :]
        tl.store(target, number.to(out.dtype.element_ty), mask=mask)
