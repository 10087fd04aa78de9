"""GEMM of float32 activations and bfloat16 weights on a CPU, computed in float32.

A bfloat16 value is the upper half of a float32 value, so the result is that of the same weights in float32, and the
weights take half of the memory and of the memory bandwidth. With few tokens our C kernel widens the weights in
registers. With more tokens AMX tiles multiply, or the weights are widened into a buffer, a part of the rows at a time,
and the library multiplies.
"""

from __future__ import annotations

import torch

from slipstream.ops import native as kernels
from slipstream.ops.linear import native, reference, tiles

# of the C kernel: its time is proportional to the tokens, that of widening is not. The library is faster on x86
MAX_TOKENS = 32 if native.ON_ARM else 16
_PART = 1 << 21  # weights widened at a time: 8 MiB


def linear_bfloat16(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] float32, weight [out, in] bfloat16 to [T, out] float32."""
    if len(x) <= MAX_TOKENS and kernels.serves(x):
        return native.skinny_gemm(x, weight, bias)
    if tiles.accepts(x, weight):
        return tiles.tile_gemm(x, weight, bias)
    num_rows = max(1, _PART // max(1, weight.shape[1]))
    if len(weight) <= num_rows:
        return reference.linear(x, weight.float(), bias)
    out = x.new_empty(len(x), len(weight))
    for first in range(0, len(weight), num_rows):
        rows = slice(first, first + num_rows)
        out[:, rows] = reference.linear(x, weight[rows].float(), None if bias is None else bias[rows])
    return out
