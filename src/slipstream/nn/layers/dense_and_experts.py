"""DenseAndExperts: the feed-forward of Gemma 4 with experts: an MLP beside experts, each with norms of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slipstream.nn.context import ForwardContext, LastTokens, context_of
from slipstream.nn.layers.experts import Experts
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.mlp import Mlp, of_last
from slipstream.nn.layers.norm import Norm, RMSNorm
from slipstream.nn.shapes import DenseAndExpertsShape
from slipstream.nn.weight_format import CheckpointTensor, WeightTarget, new_parameter
from slipstream.ops.moe import Routing


class DenseAndExperts(Layer):
    """norm(mlp(normed x)) + norm(experts(norm(x))). The router has a norm of its own, and a scale for each expert."""

    def __init__(self, name: str, shape: DenseAndExpertsShape, layout: Layout) -> None:
        super().__init__()
        hidden, dtype, norm = layout.hidden_size, layout.dtype, shape.norm

        def new_norm() -> RMSNorm:
            return RMSNorm(hidden, norm.eps, dtype, norm.offset)

        self.dense = Mlp(f"{name}.dense", shape.mlp, layout)
        self.dense_out_norm = new_norm()
        self.routed = Experts(f"{name}.routed", shape.experts, layout)
        self.routed_norm = new_norm()
        self.routed_out_norm = new_norm()
        self.router_norm = new_norm()
        self.expert_scale = new_parameter(shape.experts.num_experts, dtype=dtype)
        self.router_scale = hidden**-0.5

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        normed, total = norm(*of_last(x, residual, last))
        context = context_of(context, last)
        dense, _ = self.dense_out_norm(self.dense(normed, context))
        logits = self.routed.router(self.router_norm(total)[0], context) * self.router_scale
        ids, weights, has_padding = self.routed.choose(logits, context)
        known = ids.flatten().clamp(max=len(self.expert_scale) - 1)  # padding has no expert
        scales = self.expert_scale.index_select(0, known).view(ids.shape)
        routed = self.routed.run(self.routed_norm(total)[0], Routing(ids, weights * scales, has_padding), context)
        return dense + self.routed_out_norm(routed)[0], total

    def products(self) -> None:
        return None

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "expert_scale", WeightTarget(tuple(self.expert_scale.shape), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        piece.write_to(self.expert_scale)
