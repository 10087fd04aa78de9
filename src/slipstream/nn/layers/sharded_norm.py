"""Norms and statistics over numbers of which each rank has a part: their sums are exchanged, not the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from slipstream.nn.layers.activations import Activation, find_activation, sparse_deviations
from slipstream.nn.layers.ranked import RankedLayer
from slipstream.nn.shapes import Shard
from slipstream.nn.weight_format import CheckpointTensor, StoredPart, WeightTarget, new_parameter


class ShardedGatedNorm(RankedLayer):
    """The gated norm of Mamba-2 (`gated_group_norm`) whose groups are larger than the part of one rank."""

    def __init__(self, size: int, num_groups: int, eps: float, norm_first: bool, shard: Shard) -> None:
        """`size`: of this rank; `num_groups`: of all ranks, a divisor of their number."""
        super().__init__()
        self.num_groups, self.eps, self.norm_first = num_groups, eps, norm_first
        self.own = shard.rank * num_groups // shard.size
        self.group_size = size * shard.size // num_groups

    def forward(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x, gate [T, size], weight [size]; the result has the gate's dtype."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        x, opened = x.to(wide), F.silu(gate.to(wide))
        if not self.norm_first:
            x = x * opened
        sums = x.new_zeros(len(x), self.num_groups)
        sums[:, self.own] = x.square().sum(1)
        total = self.ranks.all_reduce(sums)[:, self.own : self.own + 1]
        x = x * torch.rsqrt(total / self.group_size + self.eps) * weight.to(wide)
        return (x * opened if self.norm_first else x).to(gate.dtype)


class ShardedHeadsNorm(RankedLayer):
    """One RMS norm over the queries of all heads and one over the keys of all heads, of which a rank has some."""

    def __init__(
        self,
        num_heads: Mapping[str, int],
        parts: Mapping[str, StoredPart],
        eps: float,
        dtype: torch.dtype,
        shard: Shard,
    ) -> None:
        """`num_heads`: of this rank, by kind; `parts`: the numbers of these heads among those of all heads. Heads that
        several ranks have are counted once."""
        super().__init__()
        self.eps = eps
        self.sizes = [part.total for part in parts.values()]
        self.own_sizes = [sum(size for _, size in part.ranges) for part in parts.values()]
        self.copies = [own * shard.size / total for own, total in zip(self.own_sizes, self.sizes, strict=True)]
        self.num_heads = dict(num_heads)
        self.stored_parts = dict(parts)
        self.weight = new_parameter(sum(self.own_sizes), dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [T, heads of all kinds, head dim]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        flat = x.flatten(1).to(wide)
        parts = flat.split(self.own_sizes, 1)
        sums = [part.square().sum(1) / (size * n) for part, size, n in zip(parts, self.sizes, self.copies, strict=True)]
        scales = torch.rsqrt(self.ranks.all_reduce(torch.stack(sums, 1)) + self.eps)
        normed = torch.cat([part * scales[:, n : n + 1] for n, part in enumerate(parts)], 1)
        return (normed * self.weight.to(wide)).to(x.dtype).view(x.shape)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        first = 0
        for kind, size in zip(self.num_heads, self.own_sizes, strict=True):
            yield f"{kind}.weight", WeightTarget((size,), partial(self._fill, first))
            first += size

    def _fill(self, first: int, piece: CheckpointTensor) -> None:
        self.weight[first : first + piece.shape[0]].copy_(piece.read())


class ShardedSparseGate(RankedLayer):
    """`sparse_gated` of gates of which each rank has as many: mean and deviation are those of all gates."""

    def __init__(self, name: str, sparsity: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation: Activation = find_activation(name)
        self.deviations = sparse_deviations(sparsity, dtype)

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, gates and ups] to [T, gates]."""
        gate, up = gate_up.chunk(2, -1)
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        own = torch.stack((wide.mean(-1), wide.var(-1, unbiased=False)), -1)
        means, variances = self.ranks.all_gather(own).unflatten(0, (-1, len(own))).unbind(-1)  # [ranks, T]
        variance = variances.mean(0) + means.var(0, unbiased=False)
        cutoff = (means.mean(0) + variance.sqrt() * self.deviations).unsqueeze(-1)
        return self.activation(F.relu(wide - cutoff).to(gate.dtype)) * up
