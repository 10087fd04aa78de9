"""Learned position embeddings: a vector per position or token type, or a bias per distance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from slipstream.nn.context import RelativeScores
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.norm import LayerNorm
from slipstream.nn.weights.weight_format import CheckpointTensor, WeightTarget, new_parameter

Positions = Callable[[], torch.Tensor]
"""q, k and v of the embedding of each distance; see `DisentangledScores`."""


class Table(Layer):
    """A vector for each of some indices. A checkpoint may have rows before the first, which are left out here."""

    def __init__(self, num_rows: int, size: int, dtype: torch.dtype, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.weight = new_parameter(num_rows, size, dtype=dtype)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, indices)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        num_rows, size = self.weight.shape
        yield "weight", WeightTarget((num_rows + self.offset, size), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        self.weight.copy_(piece.read()[self.offset :])


class DistanceBias(Layer):
    """Biases added to attention scores by the distance of two tokens: each near distance has its own, far ones
    share, more and more of them; from `max_distance` on all have the same."""

    def __init__(
        self, num_buckets: int, num_heads: int, num_positions: int, dtype: torch.dtype, max_distance: int = 128
    ) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.weight = new_parameter(num_buckets, num_heads, dtype=dtype)
        self.register_buffer("buckets", torch.empty(2 * num_positions - 1, dtype=torch.int64))

    buckets: torch.Tensor

    def fill(self) -> None:
        """On the host, so that all devices have the same."""
        reach = len(self.buckets) // 2
        buckets = distance_buckets(torch.arange(-reach, reach + 1), self.weight.shape[0], self.max_distance)
        self.buckets = buckets.to(self.buckets.device)

    def forward(self) -> torch.Tensor:
        """[heads, 2 n - 1] as `AttentionBackend.bidirectional` takes it."""
        return self.weight.index_select(0, self.buckets).t().contiguous()

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget(tuple(self.weight.shape), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        self.weight.copy_(piece.read())


class Alibi(Layer):
    """Numbers subtracted from attention scores: the distance times a slope, which each head has one of its own."""

    def __init__(self, num_heads: int, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(num_heads, 2 * num_positions - 1, dtype=dtype))

    table: torch.Tensor

    def fill(self) -> None:
        """On the host, so that all devices have the same."""
        num_heads, width = self.table.shape
        reach = width // 2
        distances = torch.arange(-reach, reach + 1).abs()
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float64)
        self.table = (-slopes.unsqueeze(1) * distances).to(self.table.dtype).to(self.table.device)

    def forward(self) -> torch.Tensor:
        """[heads, 2 n - 1] as `AttentionBackend.bidirectional` takes it."""
        return self.table


def alibi_slopes(num_heads: int) -> list[float]:
    """Powers of 2 from 2^(-8 / n) on, n being a power of 2; other counts take every second one of twice as many for the
    rest."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else slopes + alibi_slopes(2 * power)[::2][: num_heads - power]


class RelativeKeys(Layer):
    """A vector for each distance between two tokens, compared with queries (and keys, too) as keys are with queries.

    A checkpoint has them by query - key, from the farthest on. Here they lie by key - query, and only those that texts
    of `num_positions` tokens need.
    """

    def __init__(
        self, max_positions: int, num_positions: int, head_dim: int, with_keys: bool, dtype: torch.dtype
    ) -> None:
        """`max_positions` is what the checkpoint counts from."""
        super().__init__()
        assert num_positions <= max_positions, f"{num_positions} positions of {max_positions}"
        self.max_positions = max_positions
        self.with_keys = with_keys
        self.weight = new_parameter(2 * num_positions - 1, head_dim, dtype=dtype)

    def forward(self, query: torch.Tensor, key: torch.Tensor, positions: Positions) -> RelativeScores:
        """From [T, heads, head dim] each; `positions` is for other kinds of relative scores."""
        distances = self.weight.t()
        return RelativeScores(query @ distances, key @ distances if self.with_keys else None)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((2 * self.max_positions - 1, self.weight.shape[1]), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        unused = self.max_positions - (len(self.weight) + 1) // 2  # distances at each end that are too far
        self.weight.copy_(piece.read().flip(0)[unused : unused + len(self.weight)])


def distance_buckets(distances: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """The bucket of a key's position minus the query's: the lower half of the buckets for earlier keys, the upper for
    later keys. Half of each half are single distances; the others grow with the logarithm."""
    half = num_buckets // 2
    single = half // 2
    away = distances.abs()
    grown = torch.log(away.clamp(min=1).float() / single) / math.log(max_distance / single) * (half - single)
    shared = (single + grown.long()).clamp(max=half - 1)
    return torch.where(distances > 0, half, 0) + torch.where(away < single, away, shared)


# Disentangled attention of DeBERTa: scores of a token and a distance, beside those of two tokens.
#
# All layers share an embedding of distances. Each layer projects it like hidden states: a query is compared with the
# keys of distances, a key with the queries of distances. Far distances share an embedding.


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
