"""Segment sum on CUDA: one program per row and block of columns, without atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 32  # per loop iteration
_COLUMNS = 128  # per program


def segment_sum(
    x: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor | None = None,
    origins: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference. Tokens are added in blocks counted from the row's first token, so the batch does not matter."""
    num_columns, num_rows = x.shape[1], len(starts) - 1
    assert x.stride(1) == 1, f"columns of x must be contiguous, their stride is {x.stride(1)}"
    assert begins is None or begins.is_contiguous()
    assert origins is None or origins.is_contiguous()
    out = torch.empty(num_rows, num_columns, dtype=torch.float32, device=x.device)
    if num_rows:
        grid = (triton.cdiv(num_columns, _COLUMNS), num_rows)
        _sum_kernel[grid](
            x, starts, begins, origins, out, num_columns, x.stride(0), TOKENS=_TOKENS, COLUMNS=_COLUMNS, num_warps=4
        )  # fmt: skip
    return out


# grid: (blocks of columns, rows)
@triton.jit
def _sum_kernel(x, starts, begins, origins, out, num_columns, stride, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    begin = tl.load(starts + row).to(tl.int64)
    end = tl.load(starts + row + 1).to(tl.int64)
    shift = begin - 1
    if origins is not None:
        shift = begin - 1 - tl.load(origins + row).to(tl.int64)
    if begins is not None:
        begin = tl.maximum(begin, tl.load(begins + row).to(tl.int64))
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = token < end
        mask = there[:, None] & inside[None, :]
        values = tl.load(x + token[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if origins is not None:
            values *= (token - shift).to(tl.float32)[:, None]
        total += tl.sum(values, 0)
    tl.store(out + row * num_columns + column, total, mask=inside)
