"""GEMM with quantised weights in plain torch: the oracle of the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream.ops.quantized.matrix import QuantizedMatrix, unpack_4_bit

SEGMENT = 64  # inputs that share a scale in `quantize_segments`
MAX_INTEGER = 32512.0
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


def quantize_segments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [columns] as integers of 16 bits, as `triton/row_kernel.py` computes them: high and low bytes
    [columns / 64, 64] int8 and scales [columns / 64] float32; x = scale * (256 * high + low)."""
    segments = x.float().unflatten(0, (-1, SEGMENT))
    largest = segments.abs().amax(1).clamp_min(1e-30)
    factor = (MAX_INTEGER / largest).double().unsqueeze(1)  # a product in float64 is exact, as it is in an FMA
    integers = (segments.double() * factor).round().to(torch.int32)
    high = integers + 128 >> 8
    return high.to(torch.int8), (integers - 256 * high).to(torch.int8), largest / MAX_INTEGER


def integer_linear(x: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    """x [1, columns] times 4-bit weights with words, [1, rows] float64, by the integer sums of `triton/row_kernel.py`.
    Integers are exact; what differs is float32, in which the kernel adds the sums of groups."""
    assert weight.words is not None and weight.group == 2 * SEGMENT
    high, low, scales = (part.unflatten(0, (-1, 2)) for part in quantize_segments(x[0]))  # of low bits, of high bits
    packed = weight.values.unflatten(1, (-1, SEGMENT))  # [rows, groups, 64]
    operands = torch.stack((packed & 15, (packed ^ 0x80) & 0xF0), 2).view(torch.int8).long()
    even, odd = ((operands * part.long()).sum(3) for part in (high, low))  # [rows, groups, 2]
    zeros = (weight.words & 255).t().unsqueeze(2).long()
    sums = (256 * high.long() + low.long()).sum(2)
    odd += torch.cat((-zeros * sums[:, :1], 16 * (8 - zeros) * sums[:, 1:]), 2)
    value = 256 * even + odd
    assert value.abs().max() < 2**31, "a sum does not fit 32 bits"
    factors = weight.words.view(torch.float32).t().double().unsqueeze(2) * scales.double()
    return (value.double() * factors * factors.new_tensor((1, 1 / 16))).sum((1, 2)).unsqueeze(0)
