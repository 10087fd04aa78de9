"""UnsummedExperts: the outputs of all experts of a step's tokens, before they are added up token by token.

The RMS norm that follows in the next layer takes them as they are: the sum is not written and read again.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from slipstream.ops.gemm.moe.reference import ExpertBiases, ExpertMatrices, Gate, Routing, Shared, SharedOutput

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
