"""AttachedModel: a model that drafts from the hidden states of another model, the target.

Embedding and projection to tokens are the target's, unless the drafter has its own.
"""

from __future__ import annotations

import torch
from torch import nn

from slipstream.nn.layers.norm import UnweightedNorm
from slipstream.nn.layers.rope import Rope
from slipstream.nn.models.decoder import Decoder
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.weight_format import take_memory


class AttachedModel(nn.Module):
    """Built on the meta device, as `Decoder`. `attach` gives it the target before its first step."""

    def __init__(self, shape: DecoderShape, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self._targets: tuple[Decoder, ...] = ()  # in a tuple, so that its weights are not part of this module
        with torch.device("meta"):
            # rope is computed for all positions of the engine, even if the drafter was trained with fewer
            self.ropes = nn.ModuleList(
                Rope(rope.info, rope.head_dim, max(shape.max_positions, num_positions), num_positions, dtype)
                for rope in shape.ropes
            )

    def attach(self, target: Decoder) -> None:
        self._targets = (target,)

    @property
    def target(self) -> Decoder:
        return self._targets[0]

    def materialize(self, device: torch.device) -> None:
        take_memory(self, device)
        for module in self.modules():
            if isinstance(module, Rope):
                module.fill()
            elif isinstance(module, UnweightedNorm):
                module.fill_buffers()

    def draft(self, hidden: torch.Tensor) -> torch.Tensor:
        """The token with the highest logit, by hidden state [n] int64."""
        return self.target.logits(hidden).argmax(1)
