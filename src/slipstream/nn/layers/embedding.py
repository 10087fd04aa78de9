"""Embedding: a vector for each token; where a model ties them, also the projection back to tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from slipstream.nn.layers.layer import Layer
from slipstream.nn.weight_format import WeightFormat, WeightSlot


class Embedding(Layer):
    def __init__(self, num_tokens: int, size: int, format: WeightFormat) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.size = size
        self.weight = format.new_weight(num_tokens, size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.lookup(ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As a tied head: the product with the same tensor."""
        return self.weight.multiply(hidden, None)

    def places(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "weight", WeightSlot((self.num_tokens, self.size), partial(self.weight.fill, 0), self.weight.num_bytes)
