"""RowParallelLinear: the last product of a layer that is divided among ranks.

A layer begins with products of which each rank has some outputs (their `stored_parts`) and ends with one of which each
rank has some inputs, so its only collective is the sum after the last product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.ranked import RankedLayer
from slipstream.nn.shapes import Shard
from slipstream.nn.stored_part import even_part, sliced_target
from slipstream.nn.weight_format import WeightFormat, WeightTarget
from slipstream.ops.linear import Activation


class RowParallelLinear(RankedLayer, Linear):
    """Each rank has some inputs; the outputs are summed over all ranks, and the bias is added once."""

    def __init__(
        self,
        num_inputs: int,
        outputs: Mapping[str, int],
        bias: bool,
        format: WeightFormat,
        dtype: torch.dtype,
        shard: Shard,
    ) -> None:
        """`num_inputs`: of this rank."""
        super().__init__(num_inputs, outputs, bias, format, dtype)
        self.input_part = even_part(num_inputs, shard)

    def forward(self, x: torch.Tensor, context: ForwardContext | None = None) -> torch.Tensor:
        out = self.ranks.all_reduce(self._multiply(x, None, context))
        return out if self.bias is None else out + self.bias

    def after_gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        out = self.ranks.all_reduce(self.weight.multiply_gated(gate_up, activation, None))
        return out if self.bias is None else out + self.bias

    @property
    def can_chain(self) -> bool:
        return False

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        columns = self.input_part
        assert columns is not None
        for name, target in super().weight_targets():
            is_bias = name.rpartition(".")[2] == "bias"
            yield name, target if is_bias else sliced_target(target, 1, columns)


def new_output(
    num_inputs: int, num_outputs: int, bias: bool, format: WeightFormat, dtype: torch.dtype, shard: Shard | None
) -> Linear:
    """The last product of a layer."""
    if shard is None:
        return Linear(num_inputs, {"": num_outputs}, bias, format, dtype)
    return RowParallelLinear(num_inputs, {"": num_outputs}, bias, format, dtype, shard)
