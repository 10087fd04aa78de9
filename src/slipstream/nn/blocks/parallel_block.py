"""ParallelBlock: a layer whose feed-forward reads the layer's input, beside the mixer and not after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.nn.blocks.block import DecoderBlock, SublayerParts
from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.layer import Layout
from slipstream.nn.shapes import LayerShape


class ParallelBlock(DecoderBlock):
    """x + mixer(norm(x)) + feed(norm(x)), where the feed has a norm of its own or shares the mixer's."""

    def __init__(
        self,
        number: int,
        shape: LayerShape,
        sites: Sequence[int | None],
        state_sites: Sequence[int | None],
        layout: Layout,
    ) -> None:
        super().__init__(number, shape, sites, state_sites, layout)
        assert len(self.sublayers) == 2 and shape.norm_before and not shape.norm_after and shape.branch_scale == 1.0

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
