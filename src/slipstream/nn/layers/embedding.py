"""Per-layer inputs of Gemma 3n and Gemma 4: a small vector per token and layer, which each layer adds to its output.

`LayerInputs` makes them once per step from the token ids and their embeddings; `LayerInput` is the sublayer that uses
those of its layer, which it finds in the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.device.collectives import Group
from slipstream.nn.context import ForwardContext, LastTokens, context_of
from slipstream.nn.layers.activations import find_activation
from slipstream.nn.layers.layer import Layer, Layout, RankedLayer
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.mlp import of_last
from slipstream.nn.layers.norm import Norm, RMSNorm
from slipstream.nn.shapes import LayerInputShape, LayerInputsShape, NormShape, Shard
from slipstream.nn.weights.weight_format import (
    CheckpointTensor,
    StoredPart,
    UnquantizedWeight,
    Weight,
    WeightFormat,
    WeightTarget,
    new_parameter,
)
from slipstream.ops.gemm.description import Gemm
from slipstream.ops.gemm.linear import linear
from slipstream.ops.gemm.lora import LoraTiles, LoraWeights, add_lora_embedding
from slipstream.ops.gemm.table import multiply


class LayerInputs(Layer):
    """(embedding of the token for all layers + norm(projection of its hidden state)) / sqrt(2)."""

    def __init__(self, name: str, shape: LayerInputsShape, norm: NormShape, layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        size = shape.num_layers * shape.size
        self.embedding = new_embedding(shape.vocab_size, size, layout.format_of(f"{name}.embedding"), shape.shard)
        self.projection = Linear(
            layout.hidden_size, {"": size}, False, layout.format_of(f"{name}.projection"), layout.dtype
        )
        self.norm = RMSNorm(shape.size, norm.eps, layout.dtype, norm.offset)
        # rounded to the weights' dtype, as in training
        with torch.device("cpu"):
            self.embedding_scale = float(torch.tensor(shape.size**0.5, dtype=layout.dtype))
            self.scale = float(torch.tensor(2.0, dtype=layout.dtype).rsqrt()) if shape.rounded else 2**-0.5
        self.projection_scale = layout.hidden_size**-0.5
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, ids: torch.Tensor, x: torch.Tensor, context: ForwardContext, num_layers: int | None = None
    ) -> torch.Tensor:
        """ids [T] and their scaled embeddings [T, hidden] to [T, layers, size]. Ids beyond this vocabulary, those of
        other modalities, have the vector of id 0. `num_layers`: the first layers are enough; there may be more."""
        known = torch.where(ids < self.shape.vocab_size, ids, 0)
        parts = None if context.batch.lora is not None else self._parts_of(num_layers)
        if parts is None:
            projected, embedded = self.projection(x, context), self.embedding(known)
        else:
            projected, embedded = linear(x, parts[0]), parts[1].index_select(0, known)
        by_layer = (-1, self.shape.size)
        projected = projected.mul_(self.projection_scale).unflatten(1, by_layer)
        embedded = embedded.mul_(self.embedding_scale).unflatten(1, by_layer)
        made: torch.Tensor = self.norm(projected)[0].add_(embedded).mul_(self.scale)
        return made

    def _parts_of(self, num_layers: int | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rows of the projection and the columns of the embedding for the first layers; None: all are used."""
        weight, table = self.projection.weight, self.embedding.weight
        if (
            num_layers is None
            or type(self.embedding) is not Embedding
            or not (type(weight) is UnquantizedWeight and type(table) is UnquantizedWeight)
        ):
            return None
        size = num_layers * self.shape.size
        if self._parts is None or len(self._parts[0]) != size or self._parts[0].data_ptr() != weight.data.data_ptr():
            self._parts = weight.data[:size], table.data[:, :size]  # kept: kernels have counters by weight
        return self._parts


class LayerInput(Layer):
    """projection(activation(gate(x)) * input of this layer); its norm is the sublayer's."""

    def __init__(self, name: str, shape: LayerInputShape, number: int, layout: Layout) -> None:
        """`number` of the layer, by which its inputs are found."""
        super().__init__()
        self.number = number
        self.activation = find_activation(shape.activation)
        format_of, hidden_size, dtype = layout.format_of, layout.hidden_size, layout.dtype
        self.gate = Linear(hidden_size, {"": shape.size}, False, format_of(f"{name}.gate"), dtype)
        self.projection = Linear(shape.size, {"": hidden_size}, False, format_of(f"{name}.projection"), dtype)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        assert context.layer_inputs is not None, "the decoder makes them before its layers run"
        gated = self.gate(x, context, self.activation) * context.layer_inputs[:, self.number]
        projected: torch.Tensor = self.projection(gated, context)
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
        normed, total = norm(*of_last(x, residual, last))
        return self(normed, context_of(context, last)), total

    def products(self) -> None:
        return None


# Embedding: a vector per token; in models with tied embeddings also the projection to tokens.


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
        return multiply(Gemm(hidden, self.weight.matrix, self.bias))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield from self.weight.targets(0, self.num_tokens)
        if self.bias is not None:
            yield "bias", WeightTarget((self.num_tokens,), self._fill_bias)

    def _fill_bias(self, piece: CheckpointTensor) -> None:
        assert self.bias is not None
        self.bias.copy_(piece.read())


# The embedding and the projection to tokens of a model that is divided among ranks: each rank has some tokens.
#
# Looked up vectors are summed over the ranks, where all but one rank have zeros; logits are gathered. The vocabulary
# need not be divisible: the last ranks may have fewer tokens.


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

    def multiply(self, gemm: Gemm) -> torch.Tensor:
        return self.part.gather(super().multiply(gemm), self.ranks)

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
