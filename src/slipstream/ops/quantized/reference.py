"""GEMM with quantised weights in plain torch: the oracle of the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream.ops.quantized.matrix import QuantizedMatrix, unpack_4_bit

MAX_FP8 = 448.0  # the largest number of float8_e4m3fn


def dequantize(weight: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, columns], computed in float32 or float64, then rounded to `dtype`."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    q = unpack_4_bit(weight.values) if weight.is_4_bit else weight.values
    numbers = q.to(wide) if weight.codebook is None else weight.codebook.to(wide)[q.int()]
    grouped = numbers.unflatten(1, (-1, weight.group))
    if weight.zero:
        grouped -= weight.zero
    if weight.zeros is not None:
        grouped -= weight.zeros.to(wide).unsqueeze(-1)
    grouped *= weight.scale.to(wide).unsqueeze(-1)
    if weight.minima is not None:
        grouped += weight.minima.to(wide).unsqueeze(-1)
    return grouped.flatten(1).to(dtype)


def quantized_linear(x: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, columns] to [T, rows]; the inputs are not quantised."""
    return F.linear(x, dequantize(weight, x.dtype), bias)


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, columns] to FP8 and a scale for each row, [T, 1] float32. `scale`: one number, for all rows."""
    wide = x.float()
    if scale is None:
        scales = (wide.abs().amax(1, keepdim=True) / MAX_FP8).clamp_min(1e-12)
    else:
        scales = scale.reshape(1, 1).expand(len(x), 1)
    # a multiplication by the reciprocal, as in the kernel
    return (wide * (1 / scales)).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn), scales


def scaled_linear(
    x: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None = None, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """As `quantized_linear` with the inputs quantised to FP8, a scale for each row."""
    q, scales = quantize_rows(x, input_scale)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = F.linear(q.to(wide), dequantize(weight, wide)) * scales.to(wide)
    return (out if bias is None else out + bias).to(x.dtype)
