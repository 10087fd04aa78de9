"""RMS norm in plain torch, computed in float32, or in float64 for float64 inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / root mean square over the last dimension, times weight: [size], or [heads, size] for x [T, heads, size]."""
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum, which is the next residual."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def sum_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual [rows, size] + the sum of parts [num, rows, size], and the sum, which is the next residual.
    Parts may have a wider dtype than the residual."""
    total = (parts.sum(0) + residual).to(residual.dtype)
    return rms_norm(total, weight, eps), total
