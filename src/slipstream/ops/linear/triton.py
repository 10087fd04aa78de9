"""Products of few rows on CUDA: the weight is streamed once, and nothing else matters.

Each program owns some outputs and reads their weight rows whole, so the order of the sum is fixed by the shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def few_rows(
    x: torch.Tensor,  # [rows, in]
    weight: torch.Tensor,  # [out, in]
    bias: torch.Tensor | None = None,
    tile: tuple[int, int, int] | None = None,  # outputs and inputs a program reads at once, and its warps
) -> torch.Tensor:
    rows, num_in = x.shape
    num_out = weight.shape[0]
    assert weight.stride(1) == 1 and x.stride(1) == 1, "inputs must be contiguous"
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    block_out, block_in, warps = tile or _tile(num_out, num_in, rows)
    _few_rows_kernel[(triton.cdiv(num_out, block_out),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_out,
        x.stride(0),
        weight.stride(0),
        ROWS=rows,
        IN=num_in,
        BIASED=bias is not None,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=warps,
    )
    return out


def _tile(num_out: int, num_in: int, rows: int) -> tuple[int, int, int]:
    """Enough programs to fill the chip, each with enough bytes on the way; settled by benchmarks/ops/linear.py."""
    if num_in >= 8192:
        return (1, 4096, 4) if rows == 1 else (1, 1024, 4)
    if num_in >= 4096:
        return 2, 2048, 8
    if num_in > 1024 or num_out < 2048:
        return 1 if num_in > 2048 or rows > 1 else 2, 1024, 4
    if rows == 1 and num_out >= 65536:
        return 4, 512, 4
    return 2 if rows == 1 else 4, 1024, 4


# grid: (blocks of outputs,)
@triton.jit
def _few_rows_kernel(
    x,
    weight,
    bias,
    out,
    num_out,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    IN: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    own = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = own < num_out
    start = weight + own.to(tl.int64)[:, None] * weight_stride
    at = tl.arange(0, BLOCK_IN)
    # one sum a row of x; Triton has no arrays of them
    sum0 = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    sum1 = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    sum2 = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    sum3 = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for first in range(0, IN, BLOCK_IN):
        k = first + at
        w = tl.load(
            start + k[None, :],
            mask=inside[:, None] & (k < IN)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        sum0 += w * tl.load(x + k, mask=k < IN, other=0.0).to(tl.float32)[None, :]
        if ROWS > 1:
            sum1 += w * tl.load(x + x_stride + k, mask=k < IN, other=0.0).to(tl.float32)[None, :]
        if ROWS > 2:
            sum2 += w * tl.load(x + 2 * x_stride + k, mask=k < IN, other=0.0).to(tl.float32)[None, :]
        if ROWS > 3:
            sum3 += w * tl.load(x + 3 * x_stride + k, mask=k < IN, other=0.0).to(tl.float32)[None, :]
    shift = tl.zeros((BLOCK_OUT,), tl.float32)
    if BIASED:
        shift = tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + own, (tl.sum(sum0, 1) + shift).to(out.dtype.element_ty), mask=inside)
    if ROWS > 1:
        tl.store(out + num_out + own, (tl.sum(sum1, 1) + shift).to(out.dtype.element_ty), mask=inside)
    if ROWS > 2:
        tl.store(out + 2 * num_out + own, (tl.sum(sum2, 1) + shift).to(out.dtype.element_ty), mask=inside)
    if ROWS > 3:
        tl.store(out + 3 * num_out + own, (tl.sum(sum3, 1) + shift).to(out.dtype.element_ty), mask=inside)


def _dot_tile(num_out: int) -> tuple[int, int, int, int]:
    if num_out >= 65536:
        return 64, 128, 4, 4
    return (32, 128, 4, 5) if num_out >= 2048 else (16, 512, 4, 3)


def some_rows(
    x: torch.Tensor,  # [rows, in], up to 32 rows
    weight: torch.Tensor,  # [out, in]
    bias: torch.Tensor | None = None,
    tile: tuple[int, int, int, int] | None = None,  # outputs, inputs, warps, stages
) -> torch.Tensor:
    """As `few_rows`, on the matrix units: rows are padded to 16 or 32, which costs nothing while the weight is read."""
    rows, num_in = x.shape
    num_out = weight.shape[0]
    assert weight.stride(1) == 1 and x.stride(1) == 1, "inputs must be contiguous"
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    block_out, block_in, warps, stages = tile or _dot_tile(num_out)
    _some_rows_kernel[(triton.cdiv(num_out, block_out),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        num_out,
        x.stride(0),
        weight.stride(0),
        IN=num_in,
        BIASED=bias is not None,
        BLOCK_ROWS=16 if rows <= 16 else 32,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=warps,
        num_stages=stages,
    )
    return out


# grid: (blocks of outputs,)
@triton.jit
def _some_rows_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    x_stride,
    weight_stride,
    IN: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    own = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, BLOCK_ROWS)
    at = tl.arange(0, BLOCK_IN)
    inside = own < num_out
    weights = weight + own.to(tl.int64)[:, None] * weight_stride
    rows = x + row.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for first in range(0, IN, BLOCK_IN):
        k = first + at
        left = tl.load(rows + k[None, :], mask=(row < num_rows)[:, None] & (k < IN)[None, :], other=0.0)
        right = tl.load(weights + k[None, :], mask=inside[:, None] & (k < IN)[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)[None, :]
    mask = (row < num_rows)[:, None] & inside[None, :]
    tl.store(out + row[:, None] * num_out + own[None, :], total.to(out.dtype.element_ty), mask=mask)
