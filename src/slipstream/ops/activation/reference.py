"""Activations in plain torch. The last dimension of the input of gated ones is [gate, up]."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu, tanh approximation."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu, exact (erf)."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate).mul_(up)


def quick_gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu, sigmoid approximation: gate * sigmoid(1.702 gate)."""
    gate, up = gate_up.chunk(2, -1)
    return torch.sigmoid(1.702 * gate).mul_(gate).mul_(up)


def relu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.relu(gate).mul_(up)


def sparse_gelu_tanh_and_mul(gate_up: torch.Tensor, deviations: float) -> torch.Tensor:
    """Gelu, tanh approximation, of what a gate exceeds the cutoff of its row by. The cutoff is the mean of the row's
    gates plus so many standard deviations."""
    gate, up = gate_up.chunk(2, -1)
    cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * deviations
    return F.gelu(F.relu(gate - cutoff), approximate="tanh").mul_(up)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """The square of ReLU, of each number by itself."""
    return F.relu(x).square_()


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x times sigmoid(gate), in place, both [rows, size]."""
    return x.mul_(torch.sigmoid(gate))
