"""Disentangled attention of DeBERTa: scores of a token and a distance, beside those of two tokens.

All layers share an embedding of distances. Each layer projects it like hidden states: a query is compared with the keys
of distances, a key with the queries of distances. Far distances share an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from slipstream.nn.context import RelativeScores
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.layer_norm import LayerNorm
from slipstream.nn.layers.position_embedding import Positions
from slipstream.nn.weight_format import CheckpointTensor, WeightTarget, new_parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class DisentangledShape:
    num_buckets: int  # to each side; 0: each distance has an embedding of its own
    max_distance: int
    norm_eps: float | None  # of a layer norm of the embedding; None: there is none

    @property
    def span(self) -> int:
        """Embeddings to each side."""
        return self.num_buckets or self.max_distance


class RelativeEmbedding(Layer):
    """The embedding of each distance that texts of `num_positions` tokens have, by key - query."""

    def __init__(self, shape: DisentangledShape, size: int, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.weight = new_parameter(2 * shape.span, size, dtype=dtype)
        self.norm: LayerNorm | None = None
        if shape.norm_eps is not None:
            self.norm = LayerNorm(size, shape.norm_eps, dtype)
        self.register_buffer("rows", torch.empty(2 * num_positions - 1, dtype=torch.int64))

    rows: torch.Tensor

    def fill(self) -> None:
        """On the host, so that all devices have the same."""
        reach = len(self.rows) // 2
        behind = torch.arange(reach, -reach - 1, -1)  # query - key
        shape = self.shape
        buckets = log_buckets(behind, shape.num_buckets, shape.max_distance) if shape.num_buckets else behind
        self.rows = (buckets + shape.span).clamp(0, 2 * shape.span - 1).to(self.rows.device)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [2 span, hidden], and the row of each distance [2 n - 1]."""
        return self.weight if self.norm is None else self.norm(self.weight), self.rows

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget(tuple(self.weight.shape), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        piece.write_to(self.weight)


class DisentangledScores(Layer):
    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim

    def forward(self, query: torch.Tensor, key: torch.Tensor, positions: Positions) -> RelativeScores:
        """From [T, heads, head dim] each. `positions`: the layer's q, k and v of each distance, [2 n - 1, ...]."""
        of_distances = positions()
        heads = of_distances.view(len(of_distances), 3, self.num_heads, self.head_dim)
        queries, keys = heads[:, 0].permute(1, 2, 0), heads[:, 1].permute(1, 2, 0)  # [heads, head dim, 2 n - 1]
        return RelativeScores(_by_head(query, keys), _by_head(key, queries))


def _by_head(x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """[T, heads, dim] and [heads, dim, columns] to [T, heads, columns]."""
    return torch.bmm(x.transpose(0, 1), others).transpose(0, 1).contiguous()


def log_buckets(distances: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Distances up to half of the buckets stay, larger ones grow with the logarithm."""
    half = num_buckets // 2
    near = (distances < half) & (distances > -half)
    away = torch.where(near, half - 1, distances.abs())
    grown = torch.ceil(torch.log(away / half) / math.log((max_distance - 1) / half) * (half - 1)) + half
    return torch.where(away <= half, distances.to(grown.dtype), grown * torch.sign(distances)).long()
