"""AttentionBackend: how attention is computed on one device, over pages or over the tokens of the step alone."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from slipstream.nn.context import BatchView, ForwardContext, RelativeScores


class AttentionBackend(Protocol):
    def plan(self, batch: BatchView, after: Any = None) -> Any:
        """Once a step, before the first layer: masks, indices, work lists shared by all layers.

        `after` is the plan of a step of which `batch` has each row's last token. Nobody uses it any more once this one
        is used, so its memory may serve both.
        """

    def forward(
        self,
        query: torch.Tensor,  # [T, heads, head dim]
        key: torch.Tensor | None,  # [T, kv heads, head dim]
        value: torch.Tensor,  # [T, kv heads, head dim]
        layer: int,
        scale: float,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Attend. Keys and values of this step are in the layer's pages already; keys are given once more where the
        device's `rope_and_write_cache` leaves them beside. Returns [T, heads, head dim]."""

    def bidirectional(
        self,
        query: torch.Tensor,  # [T, heads, head dim]
        key: torch.Tensor,  # [T, kv heads, head dim]
        value: torch.Tensor,  # [T, kv heads, head dim]
        scale: float,
        context: ForwardContext,
        reach: int = 0,
        bias: torch.Tensor | None = None,
        relative: RelativeScores | None = None,
    ) -> torch.Tensor:
        """Each token sees the tokens of its own row, before it and after: all of them, or with a `reach` so many to
        each side. No page is read or written. `bias` [heads, 2 n - 1] is added to scores by distance: the middle column
        for a token itself, the one after it for the next token; n is the longest row. `relative` is added before
        scores are scaled. Returns [T, heads, head dim]."""
