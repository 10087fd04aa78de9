"""LayerNorm: a hidden state less its mean, over its deviation. What encoders have in place of RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slipstream.nn.layers.layer import Layer
from slipstream.nn.weight_format import CheckpointTensor, WeightTarget, new_parameter
from slipstream.ops.layer_norm import add_layer_norm, layer_norm, layer_norm_of_sum


class LayerNorm(Layer):
    def __init__(self, size: int, eps: float, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size, dtype=dtype)
        self.bias = new_parameter(size, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual."""
        if residual is None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return layer_norm_of_sum(x, residual, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget(tuple(self.weight.shape), self._fill_weight)
        if self.bias is not None:
            yield "bias", WeightTarget(tuple(self.bias.shape), self._fill_bias)

    def _fill_weight(self, piece: CheckpointTensor) -> None:
        self.weight.copy_(piece.read())

    def _fill_bias(self, piece: CheckpointTensor) -> None:
        assert self.bias is not None
        self.bias.copy_(piece.read())
