"""Segment maximum and sum on CUDA: one program per row and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 512


def segment_max_into(
    out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int, begins: torch.Tensor | None = None
) -> None:
    assert begins is None or begins.is_contiguous()
    _reduce_into(out, x, starts, first, begins, adds=False)


def segment_add_into(out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int) -> None:
    _reduce_into(out, x, starts, first, None, adds=True)


def _reduce_into(
    out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int, begins: torch.Tensor | None, adds: bool
) -> None:
    num_tokens, num_columns = x.shape
    assert x.stride(1) == 1 and out.is_contiguous() and out.shape[1] == num_columns
    grid = (triton.cdiv(num_columns, _BLOCK), len(starts) - 1)
    _row_kernel[grid](
        out, x, starts, begins, first, num_tokens, num_columns, x.stride(0), ADDS=adds, BLOCK=_BLOCK, num_warps=4
    )  # fmt: skip


# grid: (blocks of columns, rows)
@triton.jit(do_not_specialize=["first", "num_tokens"])
def _row_kernel(
    out, x, starts, begins, first, num_tokens, num_columns, stride, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    begin = tl.load(starts + row).to(tl.int32)
    if begins is not None:
        begin = tl.maximum(begin, tl.load(begins + row).to(tl.int32))
    begin = tl.maximum(begin - first, 0)
    end = tl.minimum(tl.load(starts + row + 1).to(tl.int32) - first, num_tokens)
    if begin < end:
        target = out + row * num_columns + column
        result = tl.load(target, mask=inside, other=0.0)
        source = x + begin.to(tl.int64) * stride + column
        for _ in range(begin, end):
            value = tl.load(source, mask=inside, other=0.0).to(out.dtype.element_ty)
            source += stride
            if ADDS:
                result += value
            else:
                result = tl.maximum(result, value, propagate_nan=tl.PropagateNan.ALL)
        tl.store(target, result, mask=inside)
