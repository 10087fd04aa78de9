"""Quantises rows of activations to FP8, with a scale for each row.

The RMS norm or the gated activation before may be part of the pass; its result is rounded to the dtype of x, as on its
way through memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.linear.triton.epilogue import GATES
from slipstream.ops.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.quantized.reference import MAX_FP8

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
