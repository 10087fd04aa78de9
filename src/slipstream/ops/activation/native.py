"""Gated activations with the C kernels; with the reference for inputs that the kernels do not take."""

from __future__ import annotations

import torch

from slipstream.ops import native
from slipstream.ops.activation import reference


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if not gate_up.is_contiguous() or not native.serves(gate_up):
        return reference.silu_and_mul(gate_up)
    return _run("slip_silu_and_mul", gate_up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if not gate_up.is_contiguous() or not native.serves(gate_up):
        return reference.gelu_tanh_and_mul(gate_up)
    return _run("slip_gelu_tanh_and_mul", gate_up)


def _run(name: str, gate_up: torch.Tensor) -> torch.Tensor:
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=torch.float32)
    getattr(native.library(), name)(gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size)
    return out
