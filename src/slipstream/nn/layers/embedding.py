"""Embedding: a vector per token; in models with tied embeddings also the projection to tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slipstream.nn.layers.layer import Layer
from slipstream.nn.weight_format import CheckpointTensor, WeightFormat, WeightTarget, new_parameter
from slipstream.ops.lora import LoraTiles, LoraWeights, add_lora_embedding


class Embedding(Layer):
    lora: LoraWeights | None = None  # adapters of the lookup, by slot; None: it has none

    def __init__(self, num_tokens: int, size: int, format: WeightFormat, bias: torch.dtype | None = None) -> None:
        """`bias`: the dtype of the bias of `logits`; None: no bias."""
        super().__init__()
        self.num_tokens = num_tokens
        self.weight = format.new_weight(num_tokens, size)
        self.bias = None if bias is None else new_parameter(num_tokens, dtype=bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.lookup(ids)

    def adapt(self, x: torch.Tensor, ids: torch.Tensor, tiles: LoraTiles | None, scale: float = 1.0) -> torch.Tensor:
        """Add what adapters change to looked up vectors x [T, size], which were multiplied by `scale`; in place."""
        return x if tiles is None or self.lora is None else add_lora_embedding(x, ids, self.lora, tiles, scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The projection to tokens of a model with tied embeddings: the product with the same tensor."""
        return self.weight.multiply(hidden, self.bias)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield from self.weight.targets(0, self.num_tokens)
        if self.bias is not None:
            yield "bias", WeightTarget((self.num_tokens,), self._fill_bias)

    def _fill_bias(self, piece: CheckpointTensor) -> None:
        assert self.bias is not None
        self.bias.copy_(piece.read())
