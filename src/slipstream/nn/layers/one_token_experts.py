"""Whether the kernels for one token (`ops/moe/triton/one_token.py`) can run a layer of experts, and its weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.nn.layers.mlp import Mlp
from slipstream.nn.weight_format import UnquantizedWeight
from slipstream.ops.activation import silu_and_mul

if TYPE_CHECKING:
    from slipstream.nn.layers.experts import Experts
    from slipstream.nn.layers.linear import Linear
    from slipstream.ops.moe.triton.one_token import SharedExpert


class OneToken(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' output for norm(x + residual), and x + residual."""


def one_token_experts(layer: Experts, slots: torch.Tensor | None, page_size: int) -> OneToken | None:
    """The layer for a step of one token on CUDA; None if a weight, a gate or a shard needs the other kernels."""
    shape, gate_up, down = layer.shape, layer.gate_up, layer.down
    router = _matrix(layer.router)
    if (
        router is None
        or not isinstance(gate_up, torch.Tensor)
        or not isinstance(down, torch.Tensor)
        or shape.gate != "silu"
        or shape.bias
        or shape.shard is not None
        or layer.batch_invariant
    ):
        return None
    from slipstream.ops.moe.triton.one_token import Router, can_run, experts_of_one_token

    shared = None
    if layer.shared is not None:
        shared = _shared_expert(layer)
        if shared is None:
            return None
    choice = Router(router, shape.router, layer.correction_bias, slots, page_size)
    if not can_run(choice, gate_up, down, shared):
        return None
    return partial(experts_of_one_token, router=choice, gate_up=gate_up, down=down, shared=shared)


def _shared_expert(layer: Experts) -> SharedExpert | None:
    from slipstream.ops.moe.triton.one_token import SharedExpert

    mlp = layer.shared
    if not isinstance(mlp, Mlp) or mlp.activation is not silu_and_mul or mlp.shape.shard is not None:
        return None
    gate_up, down = _matrix(mlp.gate_up), _matrix(mlp.down)
    gate = None if layer.shared_gate is None else _matrix(layer.shared_gate)
    if gate_up is None or down is None or (gate is None) != (layer.shared_gate is None):
        return None
    return SharedExpert(gate_up, down, gate)


def _matrix(linear: Linear) -> torch.Tensor | None:
    """The matrix of a plain product without a bias."""
    weight = linear.weight
    return weight.data if type(weight) is UnquantizedWeight and linear.bias is None else None
