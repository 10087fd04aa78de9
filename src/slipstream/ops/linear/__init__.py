"""Products with a weight: x [rows, in] times weight [out, in], transposed, and what stands around them in a network.

With few rows the time is that of reading the weight, and on CUDA our kernels read it faster than the library's at the
shapes named here (benchmarks/ops/linear.py); everything else is the library's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from slipstream.ops.activation import gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.linear.native import linear as _library
from slipstream.ops.norm import add_rms_norm, rms_norm

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Of a gate and an up projection that lie side by side."""

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_MOST = 64  # rows that a kernel of ours takes
_FEW = 2  # rows without the matrix units
_GATES: dict[Activation | None, str] = {None: "", silu_and_mul: "silu", gelu_tanh_and_mul: "gelu_tanh"}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return gated_linear(x, weight, bias, None) if x.is_cuda else _library(x, weight, bias)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """The product, and after it an activation, if there is one."""
    if _is_ours(x, activation):
        from slipstream.ops.linear.triton import few_rows, some_rows, some_rows_win, streams_well

        gate = _GATES[activation]
        if len(x) <= _FEW:
            return few_rows(x, weight, bias, gate=gate)
        if streams_well(x, weight):
            from slipstream.ops.linear.triton.hopper import stream_rows

            return stream_rows(x, weight, bias, gate)
        if some_rows_win(len(x), len(weight), weight.shape[1]):
            return some_rows(x, weight, bias, gate)
    out = _library(x, weight, bias)
    return out if activation is None else activation(out)


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product with the RMS norm of x + residual, and that sum. Without a residual x itself is the sum."""
    # each program norms the row for itself, which costs more than it saves where rows are long
    if _is_ours(x, activation) and len(x) <= _FEW and x.shape[1] <= 2048:
        from slipstream.ops.linear.triton import Norm, few_rows

        total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = few_rows(x, weight, bias, Norm(norm, eps, residual, total), _GATES[activation])
        return out, x if total is None else total
    if residual is None:
        normed, total = rms_norm(x, norm, eps), x
    else:
        normed, total = add_rms_norm(x, residual, norm, eps)
    return gated_linear(normed, weight, bias, activation), total


def _is_ours(x: torch.Tensor, activation: Activation | None) -> bool:
    return x.is_cuda and 0 < len(x) <= _MOST and x.element_size() == 2 and _HAS_TRITON and activation in _GATES
