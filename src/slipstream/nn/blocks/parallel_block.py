"""ParallelBlock: a layer whose feed-forward reads the layer's input, beside the mixer and not after it."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.nn.blocks.block import DecoderBlock, SublayerParts
from slipstream.nn.context import ForwardContext, LastTokens


class ParallelBlock(DecoderBlock):
    """x + mixer(norm(x)) + feed(norm(x)), where the feed has a norm of its own or shares the mixer's."""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `DecoderBlock.forward`."""
        mixer, feed = self.sublayers
        mix: Any = mixer.module
        mlp: Any = feed.module
        normed, total = mixer.norm(x, residual)
        mixed = mix(normed, context, last)
        if last is not None:
            normed, total, context = last.of(normed), last.of(total), last.context
        if self.shape.parallel == "two norms":
            normed, _ = feed.norm(total)
        return mixed + mlp(normed, context), total

    def chain_parts(self) -> tuple[SublayerParts, ...] | None:
        return None
