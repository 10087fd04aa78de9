"""Mlp and PlainMlp: the feed-forward with and without a gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slipstream.nn.context import ForwardContext, LastTokens, context_of
from slipstream.nn.layers.activations import Xielu, find_activation, find_gated, scaled_gated, sparse_gated
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear, Products, new_output
from slipstream.nn.layers.norm import Norm, ShardedSparseGate
from slipstream.nn.shapes import MlpShape, has_only
from slipstream.nn.weights.stored_part import even_part, joined_part, ordered_target
from slipstream.nn.weights.weight_format import WeightFormat, WeightTarget

# fields that two products and an activation implement
_KNOWN_OF_PRODUCTS = {"size", "activation", "name", "gated", "bias", "down_bias", "fused", "up_first"}


class Mlp(Layer):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, name: str, shape: MlpShape, layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        self.activation = find_gated(shape.activation)
        if shape.sparsity and shape.shard is not None:
            self.activation = ShardedSparseGate(shape.activation, shape.sparsity, layout.dtype)
        elif shape.sparsity:
            self.activation = sparse_gated(shape.activation, shape.sparsity, layout.dtype)
        if shape.gate_scale != 1.0:
            self.activation = scaled_gated(shape.activation, shape.gate_scale)
        hidden_size, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        gate_up = {"": 2 * shape.size} if shape.fused else {"gate": shape.size, "up": shape.size}
        self.gate_up = _new_input(hidden_size, gate_up, shape, format_of(f"{name}.gate_up"), dtype)
        down_format = format_of(f"{name}.down")
        self.down = new_output(shape.size, hidden_size, shape.down_bias, down_format, dtype, shape.shard)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.activation(self.gate_up(x, context)), context)
        return hidden

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        x, residual = of_last(x, residual, last)
        context = context_of(context, last)
        if self.down.takes_gate(x, self.activation, context):
            gate_up, total = self.gate_up.after_norm(norm, x, residual, context)
            return self.down(gate_up, context, None, self.activation), total
        hidden, total = self.gate_up.after_norm(norm, x, residual, context, self.activation)
        return self.down(hidden, context), total

    def products(self) -> Products | None:
        known = has_only(self.shape, _KNOWN_OF_PRODUCTS | {"sparsity"})
        return Products(self.shape, self.gate_up, self.down, self.activation) if known else None


class PlainMlp(Layer):
    """down(activation(up(x)))."""

    def __init__(self, name: str, shape: MlpShape, layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        self.activation = Xielu(layout.dtype) if shape.activation == "xielu" else find_activation(shape.activation)
        hidden_size, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        self.up = _new_input(hidden_size, {"": shape.size}, shape, format_of(f"{name}.up"), dtype)
        down_format = format_of(f"{name}.down")
        self.down = new_output(shape.size, hidden_size, shape.down_bias, down_format, dtype, shape.shard)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(x, context, self.activation), context)
        return hidden

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        x, residual = of_last(x, residual, last)
        context = context_of(context, last)
        hidden, total = self.up.after_norm(norm, x, residual, context, self.activation)
        return self.down(hidden, context), total

    def products(self) -> Products | None:
        known = has_only(self.shape, _KNOWN_OF_PRODUCTS)
        return Products(self.shape, self.up, self.down, self.activation) if known else None


def of_last(
    x: torch.Tensor, residual: torch.Tensor | None, last: LastTokens | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and residual of the `last` tokens only, if given: a feed that is the first sublayer of the last layer."""
    if last is None:
        return x, residual
    return last.of(x), None if residual is None else last.of(residual)


def _new_input(
    hidden_size: int, outputs: dict[str, int], shape: MlpShape, format: WeightFormat, dtype: torch.dtype
) -> Linear:
    """The first product."""
    linear = (_UpGate if shape.up_first else Linear)(hidden_size, outputs, shape.bias, format, dtype)
    if shape.shard is not None:
        part = even_part(shape.size, shape.shard)
        linear.stored_parts = {name: joined_part([part] * (size // shape.size)) for name, size in outputs.items()}
    return linear


class _UpGate(Linear):
    """Gate and up of a checkpoint that stores them as one tensor with up first."""

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        half = self.num_outputs // 2
        for name, target in super().weight_targets():
            yield name, ordered_target(target, [*range(half, 2 * half), *range(half)])
