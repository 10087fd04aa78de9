"""AltUp in plain torch."""

from __future__ import annotations

import torch

from slipstream.ops.elementwise import rms_norm
from slipstream.ops.gemm.linear import linear


def route_copies(
    x: torch.Tensor,  # [T, hidden]
    norm: torch.Tensor,  # [hidden]
    eps: float,
    scale: float,
    router: torch.Tensor,  # [S, hidden]
    coefficients: torch.Tensor,  # [outputs, S]
) -> torch.Tensor:
    """coefficients times tanh(router times scale * the RMS norm of x): the weights of predictions or corrections,
    [T, outputs]."""
    routed = linear(rms_norm(x.contiguous(), norm, eps) * scale, router, None)
    return linear(torch.tanh(routed.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype), coefficients, None)


def predict_copies(copies: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """copies [T, S, hidden] plus, for each, their sum with its weights: [T, S * S], S for each copy."""
    num = copies.shape[1]
    return torch.baddbmm(copies, weights.view(-1, num, num), copies)


def correct_copies(predicted: torch.Tensor, made: torch.Tensor, weights: torch.Tensor, active: int) -> torch.Tensor:
    """predicted [T, S, hidden] plus (1 + weights [T, S]) times the error of the active copy, which is `made`
    [T, hidden]."""
    error = made - predicted[:, active]
    return predicted + error.unsqueeze(1) * (weights + 1.0).unsqueeze(2)
