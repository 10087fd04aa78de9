"""Modules behind the pooling: projections and norms of vectors, as sentence-transformers' folders have them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.checkpoint.pooling_info import DenseInfo, LayerNormInfo, ModuleInfo
from slipstream.nn.layers.activations import torch_activation
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.layer_norm import LayerNorm
from slipstream.nn.layers.linear import Linear
from slipstream.nn.weight_format import CheckpointTensor, Unquantized, WeightTarget, new_parameter

LAYER_NORM_EPS = 1e-5  # torch's default, which the module's config does not say


def vector_module(info: ModuleInfo, dtype: torch.dtype) -> nn.Module:
    if isinstance(info, DenseInfo):
        return Dense(info, dtype)
    return LayerNorm(info.size, LAYER_NORM_EPS, dtype) if isinstance(info, LayerNormInfo) else UnitNorm()


def module_names(info: ModuleInfo) -> dict[str, str]:
    """The tensors of a module's file, and the parameters that they fill."""
    if isinstance(info, LayerNormInfo):
        return {"norm.{kind}": "{kind}"}
    slope = {"activation_function.weight": "slope.weight"}
    return {"linear.{kind}": "linear.{kind}", "residual.{kind}": "residual.{kind}", **slope}


class Dense(Layer):
    """A product, an activation and perhaps the input added to it."""

    def __init__(self, info: DenseInfo, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = Linear(info.in_features, {"": info.out_features}, info.bias, Unquantized(dtype), dtype)
        self.slope: Slope | None = Slope(dtype) if info.activation == "PReLU" else None
        self.activation = torch_activation(info.activation)
        self.residual: Linear | None = None
        self.adds_input = info.residual
        if self.adds_input and info.in_features != info.out_features:
            self.residual = Linear(info.in_features, {"": info.out_features}, False, Unquantized(dtype), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        made = self.activation(made) if self.slope is None else self.slope(made)
        if self.adds_input:
            made = made + (x if self.residual is None else self.residual(x))
        out: torch.Tensor = made
        return out


class Slope(Layer):
    """PReLU: values below zero are multiplied by a learned slope."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.prelu(x, self.weight)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((1,), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        self.weight.copy_(piece.read())


class UnitNorm(Layer):
    """Vectors of length 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1)
