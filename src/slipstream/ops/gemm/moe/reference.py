"""Routing and expert MLPs in plain torch, in float64 when the input is float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from slipstream.ops.elementwise.reference import gelu_tanh_and_mul, relu2, silu_and_mul
from slipstream.ops.gemm.quantized.matrix import QuantizedExperts, dequantize

Gate = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
"""How an expert combines gate and up. "relu2": experts without gates, the squared ReLU of up."""
CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0  # of gpt-oss


@dataclass(frozen=True, slots=True)
class RouterRule:
    """The rule by which a router turns logits into experts and their weights."""

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True  # the chosen experts' weights sum to 1 before `scale`
    scale: float = 1.0
    # DeepSeek: only experts of the best `kept_groups` of `num_groups` groups of adjacent experts can be chosen
    num_groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # the score of a group: its best expert, or the sum of its best two
    epsilon: float = 1e-20  # added to the sum by which weights are divided


class Routing(NamedTuple):
    ids: torch.Tensor  # [tokens, top_k] int32, experts by descending score; the number of experts: none
    weights: torch.Tensor  # [tokens, top_k] float32, or float64 for float64 logits
    has_padding: bool = False  # some tokens may have no expert


def route(
    logits: torch.Tensor,
    rule: RouterRule,
    bias: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    page_size: int = 0,
) -> Routing:
    """Experts of each token from logits [tokens, experts]. `bias` [experts] changes the choice, never the weights.

    `slots` [tokens]: the cache slot of each token, where padding lies in page 0 of `page_size` slots. Padding is routed
    to no expert: its ids are the number of experts, its weights 0, and the output of `expert_mlp` is 0.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.softmax(-1) if rule.scores == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        grouped = choice.unflatten(1, (rule.num_groups, -1))
        best = grouped.amax(-1) if rule.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
        kept = best.topk(rule.kept_groups, -1).indices
        lost = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(lost.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.topk(rule.top_k, -1).indices
    weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.epsilon)
    routing = Routing(ids.to(torch.int32), weights * rule.scale)
    if slots is None:
        return routing
    is_padding = (slots < page_size).unsqueeze(1)
    ids = routing.ids.masked_fill(is_padding, logits.shape[1])
    return Routing(ids, routing.weights.masked_fill(is_padding, 0.0), has_padding=True)


ExpertMatrices: TypeAlias = torch.Tensor | QuantizedExperts
"""A matrix for each expert: [experts, rows, columns], or quantised."""


def count_experts(matrices: ExpertMatrices) -> int:
    return matrices.num_experts if isinstance(matrices, QuantizedExperts) else len(matrices)


def matrix_of(matrices: ExpertMatrices, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """One expert's matrix, dequantised to `dtype`."""
    if isinstance(matrices, QuantizedExperts):
        return dequantize(matrices.expert(expert), dtype)
    return matrices[expert]


class ExpertBiases(NamedTuple):
    gate_up: torch.Tensor  # [experts, 2 * inner], gates first; [experts, inner] without gates
    down: torch.Tensor  # [experts, hidden]


class SharedOutput(NamedTuple):
    """The shared expert's addend: out, or sigmoid(gate) * out."""

    out: torch.Tensor  # [tokens, hidden]
    gate: torch.Tensor | None = None  # [tokens, 1]

    def added_to(self, total: torch.Tensor) -> torch.Tensor:
        return total + (self.out if self.gate is None else torch.sigmoid(self.gate) * self.out)


Shared = Callable[[], SharedOutput]
"""Computes the shared expert. It may run beside the routed experts, on a stream of its own."""


class SharedMatrices(NamedTuple):
    """The weights of a shared expert that is like the routed ones, so that kernels may compute it with them."""

    gate_up: torch.Tensor  # [2 * inner, hidden]
    down: torch.Tensor  # [hidden, inner]
    gate: torch.Tensor | None  # [1, hidden]: its output is multiplied by sigmoid(gate of x); None: by 1


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped first: gpt-oss."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * CLAMP_ALPHA))


GATES = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul, "clamped_swiglu": clamped_swiglu, "relu2": relu2}


def expert_mlp(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    batch_invariant: bool = False,
    biases: ExpertBiases | None = None,
    gate: Gate = "silu",
    shared: Shared | None = None,
    shared_matrices: SharedMatrices | None = None,
) -> torch.Tensor:
    """Sum over a token's experts of weight * down(gate(gate and up of x)), plus the shared expert: by `shared`, or by
    its matrices where kernels prefer that.

    x [tokens, hidden]; gate_up [experts, 2 * inner, hidden], gates first, or [experts, inner, hidden] without gates;
    down [experts, hidden, inner]. The inputs of quantised experts stay as they are, on CUDA they may be quantised.
    Computes every expert for every token, so no shape depends on values.
    `batch_invariant`: kernels use one tile size for all batches.
    """
    total = torch.zeros(x.shape, dtype=routing.weights.dtype, device=x.device)
    for expert in range(count_experts(gate_up)):
        into, out = matrix_of(gate_up, expert, x.dtype), matrix_of(down, expert, x.dtype)
        weight = torch.where(routing.ids == expert, routing.weights, 0.0).sum(1, keepdim=True)
        into_bias, out_bias = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        total += weight * F.linear(GATES[gate](F.linear(x, into, into_bias)), out, out_bias)
    routed = total.to(x.dtype)
    return routed if shared is None else shared().added_to(routed)
