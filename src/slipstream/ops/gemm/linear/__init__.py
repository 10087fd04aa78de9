"""GEMM: x [rows, in] times the transpose of weight [out, in], optionally with a norm before and an activation after.

`dispatch.py` chooses the kernel by device, dtype, sizes and activation.
"""

from __future__ import annotations

import torch

from slipstream.ops.elementwise import add_rms_norm, rms_norm, sum_rms_norm
from slipstream.ops.gemm.linear import cublaslt, dispatch
from slipstream.ops.gemm.linear.dispatch import ELEMENTWISE_KERNELS, FUSED_ACTIVATIONS, Activation, GemmCall
from slipstream.ops.gemm.linear.tiles import Chain, Unnormalized

__all__ = [
    "Activation",
    "activated_linear",
    "can_append_adapters",
    "chain_for",
    "gated_linear",
    "linear",
    "linear_add",
    "linear_unnormalized",
    "linear_with_adapters",
    "norm_linear",
    "norm_linear_kept",
    "reserve_counters",
]

chain_for = dispatch.choose_chain

MIN_ROWS_PER_ADAPTER_ROW = 8  # of a weight; with fewer, products with A apart read less


def reserve_counters(device: torch.device) -> None:
    """Allocates the split-k counters of all weights on a CUDA device, for kernels that need them."""
    if device.type == "cuda" and dispatch.HAS_TRITON:
        from slipstream.ops.gemm.linear import epilogue

        epilogue.reserve_counters(device)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    call = GemmCall(x, weight, bias, None)
    return dispatch.choose(call).launch(call)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """The GEMM, then a gated activation if one is given."""
    call = GemmCall(x, weight, bias, activation)
    return dispatch.choose(call).launch(call)


def activated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """The GEMM, then an elementwise activation."""
    call = GemmCall(x, weight, bias, activation)
    for kernel in ELEMENTWISE_KERNELS:
        if kernel.accepts(call):
            return kernel.launch(call)
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
    """The GEMM of the RMS norm of x + residual, and the sum x + residual. Without a residual the sum is x."""
    if dispatch.accepts_norm(GemmCall(x, weight, bias, activation)):
        from slipstream.ops.gemm.linear.triton import Norm, gemv

        total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = gemv(x, weight, bias, Norm(norm, eps, residual, total), FUSED_ACTIVATIONS[activation])
        return out, x if total is None else total
    normed, total = _normed(x, residual, norm, eps)
    return gated_linear(normed, weight, bias, activation), total


def norm_linear_kept(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `norm_linear`, and the norm itself: the GEMM, the norm of x + residual, and that sum."""
    if dispatch.accepts_kept_norm(GemmCall(x, weight, bias, None)):
        from slipstream.ops.gemm.linear.triton import Norm, gemv

        total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = gemv(x, weight, bias, Norm(norm, eps, residual, total, normed))
        return out, normed, x if total is None else total
    normed, total = _normed(x, residual, norm, eps)
    return linear(normed, weight, bias), normed, total


def _normed(
    x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMS norm of x + residual, and that sum. Without a residual the sum is x."""
    return (rms_norm(x, norm, eps), x) if residual is None else add_rms_norm(x, residual, norm, eps)


def linear_add(
    chain: Chain, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> Unnormalized:
    """residual + the GEMM, before its RMS norm. The memory of the residual may be overwritten with the sum."""
    if chain != "streaming" and dispatch.accepts_parts(x, weight):
        from slipstream.ops.gemm.linear.streaming_hopper import streaming_gemm_parts

        normed, total = sum_rms_norm(streaming_gemm_parts(x, weight), residual, norm, eps)
        return Unnormalized(total, norm, eps, normed=normed)
    if chain != "streaming":
        if not cublaslt.add_to(residual, x, weight):
            residual.addmm_(x, weight.t())
        return Unnormalized(residual, norm, eps)
    from slipstream.ops.gemm.linear.streaming_hopper import streaming_gemm_add

    return streaming_gemm_add(x, weight, residual, norm, eps)


def linear_unnormalized(
    x: Unnormalized,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """The GEMM of the RMS norm of x, plus `added` [rows, out] if given, then a gated activation if one is given."""
    if x.squares is None:
        normed = x.rows_normed()
        if added is None:
            return gated_linear(normed, weight, bias, activation)
        out = linear(normed, weight, bias).add_(added)
        return out if activation is None else activation(out)
    from slipstream.ops.gemm.linear.streaming_hopper import streaming_gemm

    out = streaming_gemm(x, weight, bias, FUSED_ACTIVATIONS.get(activation, ""), added=added)
    return out if activation in FUSED_ACTIVATIONS or activation is None else activation(out)


def can_append_adapters(x: torch.Tensor | Unnormalized, weight: torch.Tensor, adapters: torch.Tensor) -> bool:
    """Whether `linear_with_adapters` takes inputs of a streamed chain, a weight and adapters [slots, rows, in]. They
    count as rows of the weight, so there may be few of them."""
    rows = x if isinstance(x, torch.Tensor) else x.weighted
    if rows is None or MIN_ROWS_PER_ADAPTER_ROW * adapters.shape[0] * adapters.shape[1] > len(weight):
        return False
    if not rows.is_cuda or not dispatch.takes_streaming(rows, weight):
        return False
    from slipstream.ops.gemm.linear.streaming_hopper import can_append, streaming_tile

    num_out, num_in = weight.shape
    return can_append(streaming_tile(len(rows), num_out, num_in, ""), weight, adapters)


def linear_with_adapters(x: torch.Tensor | Unnormalized, weight: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
    """[rows, out + slots * rows of a slot]: the GEMM of x, or of its RMS norm, then the products with all adapters."""
    from slipstream.ops.gemm.linear.streaming_hopper import streaming_gemm

    return streaming_gemm(x, weight, None, "", adapters=adapters)
