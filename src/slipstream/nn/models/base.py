"""The interface between the runner and a generating model."""

from __future__ import annotations

from typing import Protocol

import torch

from slipstream.nn.context import ForwardContext
from slipstream.ops.lora import LoraTiles


class CausalLM(Protocol):
    def __call__(self, context: ForwardContext) -> torch.Tensor:
        """The step's tokens to hidden states [T, hidden]; with `only_last` [B, hidden]."""

    def logits(self, hidden: torch.Tensor, tiles: LoraTiles | None = None) -> torch.Tensor:
        """Hidden states [S, hidden] to [S, vocabulary], in the model's dtype. `tiles`: those with an adapter."""
