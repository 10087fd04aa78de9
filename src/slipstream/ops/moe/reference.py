"""Routing and expert MLPs in plain torch, in float64 when the input is float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from slipstream.ops.activation.reference import silu_and_mul


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router turns logits into experts and their weights."""

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True  # the chosen experts' weights sum to 1 before `scale`
    scale: float = 1.0
    # DeepSeek: only experts of the best `kept_groups` of `num_groups` groups of neighbours can be chosen
    num_groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # the score of a group: its best expert, or the sum of its best two


class Routing(NamedTuple):
    ids: torch.Tensor  # [tokens, top_k] int32, experts by descending score
    weights: torch.Tensor  # [tokens, top_k] float32, or float64 for float64 logits


def route(logits: torch.Tensor, rule: RouterRule, bias: torch.Tensor | None = None) -> Routing:
    """Experts of each token from logits [tokens, experts]. `bias` [experts] changes the choice, never the weights."""
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
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids.to(torch.int32), weights * rule.scale)


def expert_mlp(
    x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor, batch_invariant: bool = False
) -> torch.Tensor:
    """Sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    x [tokens, hidden]; gate_up [experts, 2 * inner, hidden], gates first; down [experts, hidden, inner]. Computes every
    expert for every token, so no shape depends on values. `batch_invariant`: kernels use one tile size for all batches.
    """
    total = torch.zeros(x.shape, dtype=routing.weights.dtype, device=x.device)
    for expert, (into, out) in enumerate(zip(gate_up, down, strict=True)):
        weight = torch.where(routing.ids == expert, routing.weights, 0.0).sum(1, keepdim=True)
        made = silu_and_mul(x @ into.t()) @ out.t()
        total += weight * made
    return total.to(x.dtype)
