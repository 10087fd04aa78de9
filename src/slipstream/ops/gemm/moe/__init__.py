"""Mixture of experts: routing of tokens to experts, and the experts' gated MLPs.

The host reads no count: on CUDA, grids follow from shapes, and lists of tiles are built on the device. So a step with
experts can be captured like any other.
"""

from slipstream.ops.gemm.moe import host, reference
from slipstream.ops.gemm.moe.host import UnsummedExperts, unsummed_experts
from slipstream.ops.gemm.moe.reference import (
    ExpertBiases,
    ExpertMatrices,
    Gate,
    RouterRule,
    Routing,
    SharedMatrices,
    SharedOutput,
)
from slipstream.ops.platform.dispatch import by_device

route = by_device(reference.route, "slipstream.ops.gemm.moe.triton")
expert_mlp = by_device(host.expert_mlp, "slipstream.ops.gemm.moe.triton")

__all__ = [
    "ExpertBiases",
    "ExpertMatrices",
    "Gate",
    "RouterRule",
    "Routing",
    "SharedMatrices",
    "SharedOutput",
    "UnsummedExperts",
    "expert_mlp",
    "route",
    "unsummed_experts",
]
