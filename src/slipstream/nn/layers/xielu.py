"""Xielu: an activation with two learned numbers, of Apertus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from slipstream.nn.layers.layer import Layer
from slipstream.nn.weight_format import CheckpointTensor, WeightTarget, new_parameter

_BETA = 0.5
_EPS = -1e-6  # inputs of the exponential are at most this


class Xielu(Layer):
    """a x^2 + x / 2 for positive x, b (exp(x) - 1 - x) + x / 2 for the others; a and b are positive."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.positive = new_parameter(1, dtype=dtype)
        self.negative = new_parameter(1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above = F.softplus(self.positive) * x * x
        below = (torch.expm1(x.clamp(max=_EPS)) - x) * (_BETA + F.softplus(self.negative))
        return torch.where(x > 0, above, below) + _BETA * x

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "alpha_p", WeightTarget((1,), partial(self._fill, "positive"))
        yield "alpha_n", WeightTarget((1,), partial(self._fill, "negative"))

    def _fill(self, name: str, piece: CheckpointTensor) -> None:
        piece.write_to(getattr(self, name))
