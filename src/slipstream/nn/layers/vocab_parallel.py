"""The embedding and the projection to tokens of a model that is divided among ranks: each rank has some tokens.

Looked up vectors are summed over the ranks, where all but one rank have zeros; logits are gathered. The vocabulary need
not be divisible: the last ranks may have fewer tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.device.collectives import Group
from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.embedding import Embedding
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.ranked import RankedLayer
from slipstream.nn.shapes import Shard
from slipstream.nn.weight_format import StoredPart, Weight, WeightFormat


@dataclass(frozen=True, slots=True)
class VocabPart:
    """The tokens of one rank."""

    first: int
    size: int
    largest: int  # size of the largest part of all ranks
    total: int  # tokens of the whole vocabulary

    @staticmethod
    def of(num_tokens: int, shard: Shard) -> VocabPart:
        largest = -(-num_tokens // shard.size)
        first = min(shard.rank * largest, num_tokens)
        return VocabPart(first, min(largest, num_tokens - first), largest, num_tokens)

    def stored(self) -> StoredPart:
        return StoredPart(((self.first, self.size),), self.total)

    def lookup(self, weight: Weight, ids: torch.Tensor, group: Group) -> torch.Tensor:
        """Rows of the whole vocabulary, by id: [T] to [T, columns]."""
        own = ids - self.first
        is_other = (own < 0) | (own >= self.size)
        rows = weight.lookup(own.clamp(0, self.size - 1))
        return group.all_reduce(rows.masked_fill_(is_other.unsqueeze(1), 0.0))

    def gather(self, logits: torch.Tensor, group: Group) -> torch.Tensor:
        """Logits of this rank's tokens [T, size] to those of all tokens [T, total]."""
        padded = F.pad(logits, (0, self.largest - self.size)) if self.size < self.largest else logits
        by_rank = group.all_gather(padded).unflatten(0, (-1, len(logits)))
        return by_rank.transpose(0, 1).flatten(1)[:, : self.total].contiguous()


class VocabParallelEmbedding(RankedLayer, Embedding):
    def __init__(
        self, num_tokens: int, size: int, format: WeightFormat, shard: Shard, bias: torch.dtype | None = None
    ) -> None:
        """`num_tokens`: of the whole vocabulary."""
        part = VocabPart.of(num_tokens, shard)
        super().__init__(part.size, size, format, bias)
        self.part = part
        self.stored_parts = {"": part.stored()}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.part.lookup(self.weight, ids, self.ranks)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.part.gather(super().logits(hidden), self.ranks)


class VocabParallelHead(RankedLayer, Linear):
    """The projection to tokens."""

    def __init__(
        self, num_inputs: int, num_tokens: int, bias: bool, format: WeightFormat, dtype: torch.dtype, shard: Shard
    ) -> None:
        """`num_tokens`: of the whole vocabulary."""
        part = VocabPart.of(num_tokens, shard)
        super().__init__(num_inputs, {"": part.size}, bias, format, dtype)
        self.part = part
        self.stored_parts = {"": part.stored()}

    def forward(self, x: torch.Tensor, context: ForwardContext | None = None) -> torch.Tensor:
        return self.part.gather(super().forward(x, context), self.ranks)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.part.lookup(self.weight, ids, self.ranks)


def new_embedding(
    num_tokens: int, size: int, format: WeightFormat, shard: Shard | None, bias: torch.dtype | None = None
) -> Embedding:
    """`bias`: as in `Embedding`."""
    if shard is None:
        return Embedding(num_tokens, size, format, bias)
    return VocabParallelEmbedding(num_tokens, size, format, shard, bias)


def new_token_head(
    num_inputs: int, num_tokens: int, bias: bool, format: WeightFormat, dtype: torch.dtype, shard: Shard | None
) -> Linear:
    """The projection to tokens."""
    if shard is None:
        return Linear(num_inputs, {"": num_tokens}, bias, format, dtype)
    return VocabParallelHead(num_inputs, num_tokens, bias, format, dtype, shard)
