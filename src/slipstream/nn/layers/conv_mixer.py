"""ConvMixer: what recurrent mixers with a short convolution share: two projections, the convolution, weight targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from slipstream.nn.context import ForwardContext, LastTokens, context_of
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import Norm
from slipstream.nn.layers.products import Products, SplitProjection
from slipstream.nn.shapes import MixerShape
from slipstream.nn.weight_format import CheckpointTensor, StoredPart, WeightTarget, new_parameter


class ConvMixer(Layer):
    """One projection, a convolution and more between, and one projection to the hidden size."""

    shape: MixerShape
    input: Linear
    output: Linear
    stored_parts: Mapping[str, StoredPart] | None = None  # of a rank that has some channels; None: it has all

    def __init__(self, site: int | None, num_channels: int, width: int, bias: bool, dtype: torch.dtype) -> None:
        """`site`: the state site; the other arguments describe the convolution."""
        super().__init__()
        assert site is not None, "a recurrent mixer needs a state site"
        self.site = site
        self.conv = new_parameter(num_channels, width, dtype=dtype)
        self.conv_bias = new_parameter(num_channels, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor, context: ForwardContext, last: LastTokens | None = None) -> torch.Tensor:
        """x [T, hidden] to [T, hidden], or to [B, hidden] of the `last` tokens."""
        split = None if last is None else self.split(x, context, last)
        mixed = self.mix(self.input(x, context) if split is None else split, context, last)
        projected: torch.Tensor = self.output(mixed, context_of(context, last))
        return projected

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        if last is not None and self.can_split:
            normed, total = norm(x, residual)
            return self(normed, context, last), last.of(total)
        projected, total = self.input.after_norm(norm, x, residual, context)
        mixed = self.mix(projected, context, last)
        return self.output(mixed, context_of(context, last)), total if last is None else last.of(total)

    def products(self) -> Products | None:
        if self.shape.shard is not None:
            return None
        split = self.split if self.can_split else None
        return Products(self.shape, self.input, self.output, mix=self.mix, split=split)

    can_split = False
    """Whether `split` may return anything."""

    def split(self, normed: torch.Tensor, context: ForwardContext, last: LastTokens) -> SplitProjection | None:
        """The first product of all tokens where the state needs them, and of the last tokens elsewhere; None: not for
        this step or this weight."""
        return None

    def mix(
        self, projected: torch.Tensor | SplitProjection, context: ForwardContext, last: LastTokens | None = None
    ) -> torch.Tensor:
        """The part between the two projections. All tokens change the state, `last` or not."""
        raise NotImplementedError

    def own(self) -> dict[str, str]:
        """Parameters that the checkpoint stores as they are: name of the target to attribute."""
        return {}

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        num_channels, width = self.conv.shape
        yield "conv.weight", WeightTarget((num_channels, 1, width), self._fill_conv)
        names = self.own() | ({} if self.conv_bias is None else {"conv.bias": "conv_bias"})
        for name, attribute in names.items():
            yield name, WeightTarget(tuple(getattr(self, attribute).shape), partial(self._fill, attribute))

    def _fill_conv(self, piece: CheckpointTensor) -> None:
        self.conv.copy_(piece.read()[:, 0])

    def _fill(self, attribute: str, piece: CheckpointTensor) -> None:
        piece.write_to(getattr(self, attribute))
