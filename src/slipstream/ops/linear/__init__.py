"""Products with a weight: x [rows, in] times weight [out, in], transposed, and what stands around them in a network.

With few rows the time is that of reading the weight, and on CUDA our kernels read it faster than the library's at the
shapes named here (benchmarks/ops/linear.py). Everything else is the library's, for very many rows by the quickest of
its ways; but gates and ups of these are ours again, so that they need not be written.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from slipstream.ops.activation import gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.linear import cublaslt_tuned
from slipstream.ops.linear.native import linear as _library
from slipstream.ops.linear.unnormalized import Chain, Unnormalized
from slipstream.ops.norm import add_rms_norm, rms_norm

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Of a gate and an up projection that lie side by side, or of each number."""

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_MOST = 64  # rows that a kernel of ours takes
_MAX_CHAINED = 256  # of a chain, which saves what lies between products
_FEW = 2  # rows without the matrix units
_GATES: dict[Activation | None, str] = {None: "", silu_and_mul: "silu", gelu_tanh_and_mul: "gelu_tanh"}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return gated_linear(x, weight, bias, None) if x.is_cuda else _library(x, weight, bias)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """The product, and after it an activation, if there is one."""
    if _is_ours(x, activation):
        from slipstream.ops.linear.triton import gemv, skinny_mma, skinny_mma_wins, streams_well

        gate = _GATES[activation]
        if len(x) <= _FEW:
            return gemv(x, weight, bias, gate=gate)
        if streams_well(x, weight):
            from slipstream.ops.linear.triton.streaming_hopper import streaming_gemm

            return streaming_gemm(x, weight, bias, gate)
        if skinny_mma_wins(len(x), len(weight), weight.shape[1]):
            return skinny_mma(x, weight, bias, gate)
    if bias is None and len(x) >= cublaslt_tuned.MIN_ROWS:
        if _GATES.get(activation) and _can_gate(x, weight):
            from slipstream.ops.linear.triton.gated_gemm_hopper import gated_gemm

            return gated_gemm(x, weight, _GATES[activation])
        out = cublaslt_tuned.multiply(x, weight)
    else:
        out = None
    if out is None:
        out = _library(x, weight, bias)
    return out if activation is None else activation(out)


def activated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """The product, and after it an activation of each of its numbers."""
    if activation is F.gelu and bias is not None and len(x) >= cublaslt_tuned.MIN_ROWS and _can_gelu(x, weight, bias):
        from slipstream.ops.linear.triton.gated_gemm_hopper import gelu_gemm

        return gelu_gemm(x, weight, bias)
    return activation(linear(x, weight, bias))


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
        from slipstream.ops.linear.triton import Norm, gemv

        total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = gemv(x, weight, bias, Norm(norm, eps, residual, total), _GATES[activation])
        return out, x if total is None else total
    if residual is None:
        normed, total = rms_norm(x, norm, eps), x
    else:
        normed, total = add_rms_norm(x, residual, norm, eps)
    return gated_linear(normed, weight, bias, activation), total


def chain_for(x: torch.Tensor, weight: torch.Tensor) -> Chain:
    """The fastest chain that this weight can be part of, for inputs of as many rows as x has."""
    if not x.is_cuda or x.element_size() != 2:
        return ""
    if _HAS_TRITON and x.dtype is torch.bfloat16 and _FEW < len(x) <= _MAX_CHAINED:
        from slipstream.ops.linear.triton import streams_well

        if streams_well(x, weight, chained=True):
            return "streamed"
    return "library" if len(x) > _MOST else ""


def add_product(
    chain: Chain, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> Unnormalized:
    """The product plus the residual, which is used up, on its way through a norm."""
    if chain != "streamed":
        if not cublaslt_tuned.add_to(residual, x, weight):
            residual.addmm_(x, weight.t())
        return Unnormalized(residual, norm, eps)
    from slipstream.ops.linear.triton.streaming_hopper import streaming_gemm_add

    return streaming_gemm_add(x, weight, residual, norm, eps)


def normed_product(
    x: Unnormalized, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
) -> torch.Tensor:
    """The product with the norm, and after it an activation, if there is one."""
    if x.squares is None:
        return gated_linear(rms_norm(x.total, x.norm, x.eps), weight, bias, activation)
    from slipstream.ops.linear.triton.streaming_hopper import streaming_gemm

    out = streaming_gemm(x, weight, bias, _GATES.get(activation, ""))
    return out if activation in _GATES or activation is None else activation(out)


def _can_gate(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if not (x.is_cuda and x.dtype is torch.bfloat16 and _HAS_TRITON):
        return False
    from slipstream.ops.linear.triton import can_stream

    return len(weight) % 16 == 0 and can_stream(x, weight)  # what is made is copied out as x and weight are copied in


def _can_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> bool:
    if not (x.is_cuda and _HAS_TRITON):
        return False
    from slipstream.ops.linear.triton import can_stream

    if not can_stream(x, weight):
        return False
    from slipstream.ops.linear.triton.gated_gemm_hopper import can_fuse_gelu

    return can_fuse_gelu(x, weight, bias)


def _is_ours(x: torch.Tensor, activation: Activation | None) -> bool:
    return x.is_cuda and 0 < len(x) <= _MOST and x.element_size() == 2 and _HAS_TRITON and activation in _GATES
