"""Batch-invariant GEMM on CUDA: the bits of a row's result do not depend on the other rows of the batch.

cuBLAS selects another kernel, with another order of sums, for another number of rows. This kernel is used for every
number of rows: each output tile accumulates along the whole input in the same steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
