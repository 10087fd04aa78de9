"""Experts: a feed of several MLPs of which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.mlp import Mlp, of_last
from slipstream.nn.layers.norm import NoNorm, RMSNorm
from slipstream.nn.shapes import ExpertShape
from slipstream.nn.weight_format import CheckpointTensor, Unquantized, WeightSlot, new_parameter
from slipstream.ops.moe import expert_mlp, route


class Experts(Layer):
    """sum of weight * down(silu(gate(x)) * up(x)) over a token's experts, plus the shared expert if there is one.

    Weights of all experts are stacked: [experts, 2 * size, hidden] and [experts, hidden, size], in the model's dtype.
    """

    def __init__(self, name: str, shape: ExpertShape, layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        hidden, dtype = layout.hidden_size, layout.dtype
        format = layout.format_of(name)
        self.batch_invariant = format.batch_invariant
        plain = format if self.batch_invariant else Unquantized(dtype)
        self.router = Linear(hidden, {"": shape.num_experts}, False, plain, dtype)
        self.correction_bias = new_parameter(shape.num_experts, dtype=_wide(dtype)) if shape.correction_bias else None
        self.gate_up = new_parameter(shape.num_experts, 2 * shape.size, hidden, dtype=dtype)
        self.down = new_parameter(shape.num_experts, hidden, shape.size, dtype=dtype)
        self.shared = None if shape.shared is None else Mlp(f"{name}.shared", shape.shared, layout)
        self.shared_gate = Linear(hidden, {"": 1}, False, plain, dtype) if shape.shared_gate else None

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        routing = route(self.router(x, context), self.shape.router, self.correction_bias)
        out = expert_mlp(x, routing, self.gate_up, self.down, self.batch_invariant)
        if self.shared is None:
            return out
        shared = self.shared(x, context)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x, context)) * shared
        return out + shared

    def after_norm(
        self,
        norm: RMSNorm | NoNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Body.after_norm`."""
        normed, total = norm(*of_last(x, residual, last))
        return self(normed, context), total

    def products(self) -> None:
        return None

    def places(self) -> Iterator[tuple[str, WeightSlot]]:
        """Per expert "experts.3.gate.weight", "experts.3.up.weight" and "experts.3.down.weight"."""
        shape, hidden = self.shape, self.down.shape[1]
        for expert in range(shape.num_experts):
            for part, first in (("gate", 0), ("up", shape.size)):
                fill = partial(self._fill_gate_up, expert, first)
                yield f"experts.{expert}.{part}.weight", WeightSlot((shape.size, hidden), fill)
            yield f"experts.{expert}.down.weight", WeightSlot((hidden, shape.size), partial(self._fill_down, expert))
        if self.correction_bias is not None:
            yield "correction_bias", WeightSlot((shape.num_experts,), self._fill_bias)

    def _fill_gate_up(self, expert: int, first: int, piece: CheckpointTensor) -> None:
        piece.write_to(self.gate_up[expert, first : first + self.shape.size])

    def _fill_down(self, expert: int, piece: CheckpointTensor) -> None:
        piece.write_to(self.down[expert])

    def _fill_bias(self, piece: CheckpointTensor) -> None:
        assert self.correction_bias is not None
        piece.write_to(self.correction_bias)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Routers compute in float32 at least."""
    return torch.promote_types(dtype, torch.float32)
