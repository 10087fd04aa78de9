"""Whether the kernels for one token (`ops/moe/triton/one_token.py`) can run a layer of experts, and its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.mlp import Mlp, PlainMlp
from slipstream.nn.shapes import ExpertShape
from slipstream.nn.weight_format import UnquantizedWeight, Weight
from slipstream.ops.activation import silu_and_mul

if TYPE_CHECKING:
    from slipstream.ops.moe.triton.one_token import SharedExpert

OneToken = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""From x [1, hidden], the residual or None, weights and eps of the norm to the experts' output for norm(x + residual),
and x + residual."""


class ExpertLayers(NamedTuple):
    """The parts of a layer of experts."""

    shape: ExpertShape
    router: Linear
    correction_bias: torch.Tensor | None
    gate_up: torch.Tensor | Weight
    down: torch.Tensor | Weight
    shared: Mlp | PlainMlp | None
    shared_gate: Linear | None


def one_token_experts(layer: ExpertLayers, slots: torch.Tensor | None, page_size: int) -> OneToken | None:
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
    ):
        return None
    from slipstream.ops.moe.triton.one_token import Router, can_run, experts_of_one_token

    shared = None
    if layer.shared is not None:
        shared = _shared_expert(layer.shared, layer.shared_gate)
        if shared is None:
            return None
    choice = Router(router, shape.router, layer.correction_bias, slots, page_size)
    if not can_run(choice, gate_up, down, shared):
        return None
    return partial(experts_of_one_token, router=choice, gate_up=gate_up, down=down, shared=shared)


def _shared_expert(mlp: Mlp | PlainMlp, gate: Linear | None) -> SharedExpert | None:
    from slipstream.ops.moe.triton.one_token import SharedExpert

    if not isinstance(mlp, Mlp) or mlp.activation is not silu_and_mul or mlp.shape.shard is not None:
        return None
    gate_up, down = _matrix(mlp.gate_up), _matrix(mlp.down)
    gate_row = None if gate is None else _matrix(gate)
    if gate_up is None or down is None or (gate_row is None) != (gate is None):
        return None
    return SharedExpert(gate_up, down, gate_row)


def _matrix(linear: Linear) -> torch.Tensor | None:
    """The matrix of a plain product without a bias."""
    weight = linear.weight
    return weight.data if type(weight) is UnquantizedWeight and linear.bias is None else None
