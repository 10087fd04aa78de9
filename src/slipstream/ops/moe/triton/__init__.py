"""Mixture of experts on CUDA: route, sort by expert, two grouped GEMMs, sum over a token's experts."""

from slipstream.ops.moe.triton.gemm import expert_mlp
from slipstream.ops.moe.triton.route import route

__all__ = ["expert_mlp", "route"]
