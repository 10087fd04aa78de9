"""Logprobs of the raw logits: what the model said, before any stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.ops.sample import TopLogprobs, top_logprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """A step's report: the drawn token's logprob and rank, and the k likeliest tokens."""

    k: int
    edited: bool  # whether a stage changes the logits before the token is known

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Device, before the stages: the logits as `report` will need them."""
        return logits.clone() if self.edited else logits

    def report(self, raw: torch.Tensor, tokens: torch.Tensor) -> TopLogprobs:
        """Device, after the draw."""
        return top_logprobs(raw, tokens, self.k)
