"""Linear: one product, of which the checkpoint may have stored the parts apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from slipstream.nn.layers.layer import Layer
from slipstream.nn.weight_format import CheckpointTensor, WeightFormat, WeightSlot, new_parameter


class Linear(Layer):
    """Several projections of the same input, named, made by one product; their outputs lie side by side.

    A single unnamed one is `{"": size}`.
    """

    def __init__(
        self, num_inputs: int, outputs: Mapping[str, int], bias: bool, format: WeightFormat, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.outputs = dict(outputs)
        num_outputs = sum(self.outputs.values())
        self.weight = format.new_weight(num_outputs, num_inputs)
        self.bias = new_parameter(num_outputs, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.multiply(x, self.bias)

    def places(self) -> Iterator[tuple[str, WeightSlot]]:
        """Where the checkpoint's parts go, as "part.weight" and "part.bias"."""
        first = 0
        for part, size in self.outputs.items():
            prefix = f"{part}." if part else ""
            fill = partial(self.weight.fill, first)
            yield f"{prefix}weight", WeightSlot((size, self.num_inputs), fill, self.weight.num_bytes)
            if self.bias is not None:
                yield f"{prefix}bias", WeightSlot((size,), partial(self._fill_bias, first))
            first += size

    def _fill_bias(self, first: int, piece: CheckpointTensor) -> None:
        assert self.bias is not None
        self.bias[first : first + piece.shape[0]].copy_(piece.read())
