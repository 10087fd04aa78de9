"""RMS norm in plain torch. Computes in float32, or in float64 when the input is."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square along the last dimension, times weight. The weight may span several dimensions."""
    wide = x if x.dtype is torch.float64 else x.float()
    # five small ops; mean(x * x) would be slower on few rows, which is what a decode step has
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum itself, which is the next residual."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual
