"""Products with a weight: x [rows, in] times weight [out, in], transposed.

With few rows the time is that of reading the weight, and on CUDA our kernels read it faster than the library's at the
shapes named here (benchmarks/ops/linear.py); everything else is the library's.
"""

from __future__ import annotations

import importlib.util

import torch

from slipstream.ops.linear.native import linear as _library

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not x.is_cuda or len(x) > 32 or x.element_size() != 2 or not _HAS_TRITON:
        return _library(x, weight, bias)
    from slipstream.ops.linear.triton import few_rows, some_rows

    if len(x) <= 2:
        return few_rows(x, weight, bias)
    num_out = len(weight)
    if num_out >= 65536 or (num_out <= 4096 and weight.shape[1] <= 2048):
        return some_rows(x, weight, bias)
    return _library(x, weight, bias)
