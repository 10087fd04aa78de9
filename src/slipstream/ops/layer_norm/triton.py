"""Layer norm on CUDA, computed in float32 and rounded once. A sum that is stored is rounded before its norm is
computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return _launch(x, None, weight, bias, None, eps)


def layer_norm_of_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return _launch(x, residual, weight, bias, None, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, residual, weight, bias, total, eps), total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    total: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    size = x.shape[-1]
    assert residual is None or residual.shape == x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x.reshape(-1, size).contiguous()
    if residual is not None:
        residual = residual.contiguous()
    if not len(x):
        return out
    block = triton.next_power_of_2(size)
    rows = max(1, min(16, 2048 // block))
    _layer_norm_kernel[(triton.cdiv(len(x), rows),)](
        x,
        residual,
        weight,
        bias,
        out,
        total,
        eps,
        len(x),
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        num_warps=max(1, min(8, rows * block // 512)),
    )
    return out


# grid: (groups of rows,)
@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    total,
    eps,
    num_rows,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (column < SIZE)[None, :]
    mask = (row < num_rows)[:, None] & inside
    at = row[:, None] * SIZE + column[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        if total is not None:
            rounded = value.to(total.dtype.element_ty)
            tl.store(total + at, rounded, mask=mask)
            value = rounded.to(tl.float32)
    mean = tl.sum(value, 1) / SIZE
    value = tl.where(inside, value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
    value = value * scale[:, None] * tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        value += tl.load(bias + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
