"""AltUpBlock: a layer of Gemma 3n, which computes one of a token's streams and corrects the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.nn.blocks.block import DecoderBlock, SublayerParts
from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.altup import AltUp, Laurel
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.layer import Layout
from slipstream.nn.layers.layer_inputs import LayerInput
from slipstream.nn.layers.norm import RMSNorm
from slipstream.nn.shapes import LayerShape


class AltUpBlock(DecoderBlock):
    def __init__(
        self,
        number: int,
        shape: LayerShape,
        sites: Sequence[int | None],
        state_sites: Sequence[int | None],
        layout: Layout,
    ) -> None:
        super().__init__(number, shape, sites, state_sites, layout)
        assert shape.altup is not None and len(self.sublayers) == 3, "attention, feed-forward and per-layer input"
        name = f"layers.{number}"
        self.altup = AltUp(f"{name}.altup", shape.altup, shape.norm, layout)
        self.laurel = Laurel(f"{name}.laurel", shape.altup.laurel_rank, shape.norm, layout)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, streams, hidden]; with `last` the result is that of the last tokens. There is no residual."""
        assert residual is None and self.shape.altup is not None
        attention, feed, layer_input = self.sublayers
        assert isinstance(attention.norm, RMSNorm) and isinstance(attention.module, Attention)
        assert isinstance(layer_input.module, LayerInput)
        active = self.shape.altup.active
        predicted = self.altup.predict(x, context)
        normed, _ = attention.norm(predicted[:, active].contiguous())
        mixed = attention.module(normed, context, last)
        if last is not None:
            predicted, normed, context = last.of(predicted), last.of(normed), last.context
        mixed = predicted[:, active] + _normed(attention.norm_after, mixed)
        mixed = (mixed + (normed + self.laurel(normed, context))) * 2**-0.5
        made, _ = feed.module.after_norm(feed.norm, mixed, None, context, None)
        corrected = self.altup.correct(predicted, mixed + _normed(feed.norm_after, made), context)
        added = _normed(layer_input.norm_after, layer_input.module(self.altup.scaled(corrected), context))
        corrected[:, 1:] += added.unsqueeze(1)
        return corrected, None

    def chain_parts(self) -> tuple[SublayerParts, ...] | None:
        return None


def _normed(norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
    assert norm is not None, "layers of Gemma 3n norm the outputs of all sublayers"
    normed: torch.Tensor = norm(x)[0]
    return normed
