"""Experts of which each rank has a part: whole experts, or a part of each expert's inner size.

Ranks of one engine (tensor parallel) have the same tokens: each computes its part, and the parts are summed. Engines
that share experts (data parallel) have tokens of their own. Each gathers the tokens of all, computes its experts for
them, and gets back the sums of its own tokens. Tokens are padded to the most that an engine has, so all shapes follow
from the step's joint sizes, no count is read from the device, and the step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from slipstream.device.collectives import Group
from slipstream.nn.shapes import ExpertShard
from slipstream.ops.moe import Routing

Compute = Callable[[torch.Tensor, Routing], torch.Tensor]
"""The experts of this rank, for tokens [T, hidden] and their routing to experts of this rank."""


def run_on_ranks(
    x: torch.Tensor,
    routing: Routing,
    compute: Compute,
    shard: ExpertShard,
    num_experts: int,
    group: Group,
    num_exchanged: int,
) -> torch.Tensor:
    """The output of all experts for the tokens x [T, hidden] of this rank. `num_experts`: of all ranks;
    `num_exchanged`: tokens that each engine exchanges, at least T."""
    first, count = shard.range_of(num_experts)
    if shard.kind == "inner":
        return group.all_reduce(compute(x, routing))
    if shard.kind == "experts":
        return group.all_reduce(compute(x, _own_experts(routing, first, count)))
    assert len(x) <= num_exchanged, f"{len(x)} tokens, and engines exchange {num_exchanged}"
    all_x, all_routing = _gather(x, routing, num_experts, group, num_exchanged)
    return group.reduce_scatter(compute(all_x, _own_experts(all_routing, first, count)))[: len(x)]


def _own_experts(routing: Routing, first: int, count: int) -> Routing:
    """The same routing by the numbers of this rank's experts. Choices of other experts become `count`, with weight
    0."""
    ids = routing.ids - first
    is_own = (ids >= 0) & (ids < count)
    return Routing(ids.where(is_own, count), routing.weights.where(is_own, 0.0), has_padding=True)


def _gather(
    x: torch.Tensor, routing: Routing, num_experts: int, group: Group, num_tokens: int
) -> tuple[torch.Tensor, Routing]:
    """Tokens and routing of all engines, in the order of ranks, by one collective over their bytes."""
    missing = num_tokens - len(x)
    ids, weights = routing.ids, routing.weights
    if missing:
        x, weights = F.pad(x, (0, 0, 0, missing)), F.pad(weights, (0, 0, 0, missing))
        ids = F.pad(ids, (0, 0, 0, missing), value=num_experts)  # padding has no expert
    parts = [part.contiguous().view(torch.uint8) for part in (x, weights, ids)]
    gathered = group.all_gather(torch.cat(parts, 1)).split([part.shape[1] for part in parts], 1)
    all_x, all_weights, all_ids = (
        part.contiguous().view(like.dtype) for part, like in zip(gathered, (x, weights, ids), strict=True)
    )
    return all_x, Routing(all_ids, all_weights, has_padding=True)
