"""AttentionBackend: how attention over pages is computed on one device."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from slipstream.nn.context import BatchView, ForwardContext


class AttentionBackend(Protocol):
    def plan(self, batch: BatchView) -> Any:
        """Once a step, before the first layer: masks, indices, work lists shared by all layers."""

    def forward(
        self,
        query: torch.Tensor,  # [T, heads, head dim]
        key: torch.Tensor,  # [T, kv heads, head dim]
        value: torch.Tensor,  # [T, kv heads, head dim]
        layer: int,
        scale: float,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Write keys and values of this step into the layer's pages, then attend. Returns [T, heads, head dim]."""
