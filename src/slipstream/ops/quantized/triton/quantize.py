"""Quantises rows of activations to FP8, with a scale for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.quantized.reference import MAX_FP8

_MAX = tl.constexpr(MAX_FP8)


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        warps = 4 if block <= 4096 else 8
        _quantize_kernel[(rows,)](
            x, scale, out, scales, x.stride(0), SIZE=size, BLOCK=block, num_warps=warps, **dependent(x.device, rows)
        )
    return out, scales


# grid: (rows,)
@triton.jit
def _quantize_kernel(x, given, out, scales, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    release_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    wait_for_previous(DEPENDENT)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if given is None:
        scale = tl.maximum(tl.max(tl.abs(value), 0) / _MAX, 1e-12)
    else:
        scale = tl.load(given)
    tl.store(scales + row, scale)
    value = tl.minimum(tl.maximum(value * (1 / scale), -_MAX), _MAX)
    tl.store(out + row * SIZE + column, value.to(tl.float8e4nv), mask=inside)
