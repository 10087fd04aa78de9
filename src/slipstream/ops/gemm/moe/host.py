"""Expert MLPs on the CPU: tokens are sorted by expert, one GEMM per expert that has tokens."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slipstream.device.sync_check import sync_allowed
from slipstream.ops.elementwise import gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.gemm.moe import reference
from slipstream.ops.gemm.moe.reference import (
    ExpertBiases,
    ExpertMatrices,
    Gate,
    Routing,
    Shared,
    SharedMatrices,
    SharedOutput,
    count_experts,
    matrix_of,
)

_GATES = reference.GATES | {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


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
    """As the reference. A token's experts are added by descending score, so the sum does not depend on the batch."""
    if x.is_cuda:  # float64 on CUDA: reading counts would synchronize
        return reference.expert_mlp(x, routing, gate_up, down, batch_invariant, biases, gate, shared)
    top_k = routing.ids.shape[1]
    flat = routing.ids.flatten().to(torch.int64)
    order = flat.argsort(stable=True)
    with sync_allowed("the counts lie on the CPU, as all tensors here"):
        num_experts = count_experts(gate_up)
        counts = torch.bincount(flat, minlength=num_experts).numpy()[:num_experts]  # without padding
    rows = x.index_select(0, order // top_k)
    made = torch.zeros_like(rows) if routing.has_padding else torch.empty_like(rows)
    begin = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        end = begin + count
        into_bias, out_bias = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        inner = _GATES[gate](F.linear(rows[begin:end], matrix_of(gate_up, expert, x.dtype), into_bias))
        made[begin:end] = F.linear(inner, matrix_of(down, expert, x.dtype), out_bias)
        begin = end
    by_choice = torch.empty_like(made).index_copy_(0, order, made).unflatten(0, (-1, top_k))
    routed = (by_choice * routing.weights.unsqueeze(-1)).sum(1).to(x.dtype)
    return routed if shared is None else shared().added_to(routed)


# UnsummedExperts: the outputs of all experts of a step's tokens, before they are added up token by token.
#
# The RMS norm that follows in the next layer takes them as they are: the sum is not written and read again.

MIN_TOKENS = 65  # with fewer, kernels for few tokens add the experts up, or the next GEMM computes the norm
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class UnsummedExperts(NamedTuple):
    """Made on CUDA only."""

    made: torch.Tensor  # [.., hidden] outputs of the pairs, times their weights
    positions: torch.Tensor | None  # [tokens * top_k] row of each pair; None: in order
    routing: Routing
    num_experts: int
    shared: SharedOutput | None

    def add_and_norm(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The RMS norm of the sum with the residual, and that sum."""
        from slipstream.ops.gemm.moe.combine import combine_and_norm

        return combine_and_norm(*self, residual, weight, eps)


def unsummed_experts(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    batch_invariant: bool,
    biases: ExpertBiases | None,
    gate: Gate,
    shared: Shared | None,
) -> UnsummedExperts | None:
    """As `expert_mlp`, before the sum; None where `expert_mlp` is faster, and where a row has the same bits in every
    batch: the norm that adds the experts up sums squares in another order than the one that steps of few tokens run."""
    if batch_invariant or not x.is_cuda or x.dtype is torch.float64 or not _HAS_TRITON or len(x) < MIN_TOKENS:
        return None
    from slipstream.ops.gemm.moe.triton import expert_pairs

    return UnsummedExperts(*expert_pairs(x, routing, gate_up, down, batch_invariant, biases, gate, shared))
