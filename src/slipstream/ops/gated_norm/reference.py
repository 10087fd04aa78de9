"""Gated norms in plain torch, in float32 at least, in float64 when the gate is float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_group_norm(
    x: torch.Tensor,  # [T, size]
    gate: torch.Tensor,  # [T, size]
    weight: torch.Tensor | None,  # [size]
    eps: float,
    num_groups: int = 1,
    norm_first: bool = False,
) -> torch.Tensor:
    """weight * RMS norm of x * silu(gate) in groups of neighbours, or with `norm_first` silu(gate) * weight * RMS norm
    of x; of the gate's dtype. Without a weight there is no norm: x * silu(gate)."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    x, opened = x.to(wide), F.silu(gate.to(wide))
    if weight is None:
        return (x * opened).to(gate.dtype)
    if not norm_first:
        x = x * opened
    grouped = x.unflatten(1, (num_groups, -1))
    x = F.rms_norm(grouped, grouped.shape[2:], None, eps).flatten(1) * weight.to(wide)
    return (x * opened if norm_first else x).to(gate.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of x [T, heads, dim] along the last dimension, times weight [dim] and silu(gate); of the gate's dtype.

    gate [T, heads, dim].
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    normed = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    return (normed * F.silu(gate.to(wide))).to(gate.dtype)
