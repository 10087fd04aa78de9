"""Norm and rotary turn of queries and keys on CUDA, in one pass over the heads of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rows: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim], normed per head by weight [heads, dim] if there is one, then turned by rows [T, 2, rotary]."""
    num_tokens, num_heads, dim = x.shape
    rotary = rows.shape[-1]
    out = torch.empty((num_tokens, num_heads, dim), dtype=x.dtype, device=x.device)
    assert x.stride(2) == 1 and rows.is_contiguous(), "head dims and table rows must be contiguous"
    block_heads = min(triton.next_power_of_2(num_heads), 8)
    _norm_rope_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        x,
        x if weight is None else weight,
        rows,
        out,
        x.stride(0),
        x.stride(1),
        eps,
        HEADS=num_heads,
        DIM=dim,
        ROTARY=rotary,
        NORMED=weight is not None,
        BLOCK_H=block_heads,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
    )
    return out


# grid: (tokens, blocks of heads)
@triton.jit
def _norm_rope_kernel(
    x,
    weight,
    rows,
    out,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    half: tl.constexpr = ROTARY // 2
    # the dimension each one turns with; those past the rotary part stay
    other = tl.where(dim < half, dim + half, tl.where(dim < ROTARY, dim - half, dim))
    mask = (head < HEADS) & (dim < DIM)
    start = x + token * token_stride + head * head_stride
    own = tl.load(start + dim, mask=mask, other=0.0).to(tl.float32)
    across = tl.load(start + other, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
        own *= scale * tl.load(weight + head * DIM + dim, mask=mask, other=0.0).to(tl.float32)
        across *= scale * tl.load(weight + head * DIM + other, mask=mask, other=0.0).to(tl.float32)
    turns = dim < ROTARY
    row = rows + token * (2 * ROTARY)
    cos = tl.load(row + dim, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(row + ROTARY + dim, mask=turns, other=0.0).to(tl.float32)
    turned = own * cos + across * sin
    tl.store(out + (token * HEADS + head) * DIM + dim, turned.to(out.dtype.element_ty), mask=mask)
