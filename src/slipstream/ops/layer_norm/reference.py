"""Layer norm in plain torch, which computes it in float32, or in float64 when the input is."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x less its mean along the last dimension, over its deviation, times weight and plus bias."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def layer_norm_of_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The norm of x + residual, where the sum itself is not needed: norms that stand behind."""
    return F.layer_norm(x + residual, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum itself, which is the next residual: norms that stand before."""
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total
