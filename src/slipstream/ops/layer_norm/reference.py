"""Layer norm in plain torch, computed in float32, or in float64 for float64 inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / standard deviation over the last dimension, times weight, plus bias."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def layer_norm_of_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The norm of x + residual (post-norm: the sum is not needed)."""
    return F.layer_norm(x + residual, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum, which is the next residual (pre-norm)."""
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total
