"""Per-layer inputs of Gemma 3n and Gemma 4: a small vector per token and layer, which each layer adds to its output.

`LayerInputs` makes them once per step from the token ids and their embeddings; `LayerInput` is the sublayer that uses
those of its layer, which it finds in the context.
"""

from __future__ import annotations

import torch

from slipstream.nn.context import ForwardContext, LastTokens, context_of
from slipstream.nn.layers.activations import find_activation
from slipstream.nn.layers.embedding import Embedding
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.mlp import of_last
from slipstream.nn.layers.norm import Norm, RMSNorm
from slipstream.nn.layers.vocab_parallel import new_embedding
from slipstream.nn.shapes import LayerInputShape, LayerInputsShape, NormShape
from slipstream.nn.weight_format import UnquantizedWeight
from slipstream.ops.linear import linear


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
        gated = self.gate.activated(x, self.activation, context) * context.layer_inputs[:, self.number]
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
