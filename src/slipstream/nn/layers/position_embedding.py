"""Learned position embeddings: a vector per position or token type, or a bias per distance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from slipstream.nn.context import RelativeScores
from slipstream.nn.layers.layer import Layer
from slipstream.nn.weight_format import CheckpointTensor, WeightTarget, new_parameter

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
