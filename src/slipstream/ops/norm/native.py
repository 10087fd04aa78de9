"""RMS norm with the C kernels; with the reference for inputs that the kernels do not take."""

from __future__ import annotations

import torch

from slipstream.ops import native
from slipstream.ops.norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not native.serves(x) or weight.dtype is not x.dtype:
        return reference.rms_norm(x, weight, eps)
    if weight.dim() == 2 and x.stride()[1:] == (x.shape[2], 1):
        return _norm_heads(x, weight, eps)
    if weight.dim() != 1 or not x.is_contiguous():
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=torch.float32)
    _run(x, None, weight, x, out, eps)
    return out


def _norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, heads, size], weight [heads, size]."""
    library = native.library()
    assert library is not None and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    library.slip_norm_heads(x.data_ptr(), weight.data_ptr(), out.data_ptr(), eps, *x.shape, x.stride(0))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    fits = x.is_contiguous() and residual.is_contiguous() and x.dtype is residual.dtype is weight.dtype
    if not fits or not native.serves(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    total, out = torch.empty(x.shape, dtype=torch.float32), torch.empty(x.shape, dtype=torch.float32)
    _run(x, residual, weight, total, out, eps)
    return out, total


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    library = native.library()
    assert library is not None
    size = x.shape[-1]
    library.slip_add_rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        total.data_ptr(),
        out.data_ptr(),
        eps,
        x.numel() // size,
        size,
    )
