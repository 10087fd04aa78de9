"""Norms of decoders: of a hidden state, of each head of queries and keys, or of all their heads together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from slipstream.nn.layers.activations import Activation, find_activation, sparse_deviations
from slipstream.nn.layers.layer import Layer, RankedLayer
from slipstream.nn.shapes import NormShape, Shard, has_only
from slipstream.nn.weights.weight_format import CheckpointTensor, StoredPart, WeightTarget, new_parameter
from slipstream.ops.elementwise import add_layer_norm, add_rms_norm, layer_norm, layer_norm_of_sum, rms_norm

# LayerNorm: a hidden state less its mean, over its deviation. What encoders have in place of RMSNorm.


class LayerNorm(Layer):
    def __init__(self, size: int, eps: float, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size, dtype=dtype)
        self.bias = new_parameter(size, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual."""
        if residual is None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return layer_norm_of_sum(x, residual, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget(tuple(self.weight.shape), self._fill_weight)
        if self.bias is not None:
            yield "bias", WeightTarget(tuple(self.bias.shape), self._fill_bias)

    def _fill_weight(self, piece: CheckpointTensor) -> None:
        self.weight.copy_(piece.read())

    def _fill_bias(self, piece: CheckpointTensor) -> None:
        assert self.bias is not None
        self.bias.copy_(piece.read())


class RMSNorm(Layer):
    """`offset` is added to the checkpoint's weights: some families store weight - 1."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = new_parameter(size, dtype=dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """norm(x + residual), and x + residual. Without a residual the sum is x itself."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget(tuple(self.weight.shape), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        self.weight.copy_(_shifted(piece, self.offset))


class ResidualLayerNorm(LayerNorm):
    """A layer norm that takes and returns the residual as `RMSNorm` does."""

    def __init__(self, size: int, shape: NormShape, dtype: torch.dtype) -> None:
        super().__init__(size, shape.eps, dtype, shape.bias)
        self.offset = shape.offset

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """norm(x + residual), and x + residual. Without a residual the sum is x itself."""
        if residual is None:
            return super().forward(x), x
        return self.add(x, residual)

    def _fill_weight(self, piece: CheckpointTensor) -> None:
        self.weight.copy_(_shifted(piece, self.offset))


class EncoderRMSNorm(RMSNorm):
    """An RMS norm with the interface of `LayerNorm`."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The norm of x, or of x + residual."""
        return super().forward(x, residual)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum."""
        return super().forward(x, residual)


class UnweightedNorm(Layer):
    """x over its root mean square, without weights. Kernels have weights, so these are ones."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("ones", torch.empty(size, dtype=dtype))

    ones: torch.Tensor

    def fill_buffers(self) -> None:
        """To be called once the module has memory."""
        self.ones.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.ones, self.eps)


class NoNorm(Layer):
    """In place of a norm in families without one: returns the sum twice."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return total, total


class AppliedNorm(Layer):
    """In place of a norm that is computed already: x is the norm, and the residual the sum that it is of."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        assert residual is not None
        return x, residual


Norm = RMSNorm | ResidualLayerNorm | NoNorm | AppliedNorm
"""What may precede a sublayer."""


def new_norm(size: int, shape: NormShape, dtype: torch.dtype) -> RMSNorm | ResidualLayerNorm:
    assert has_only(shape, {"eps", "offset", "kind", "bias"}), f"norms do not implement all of {shape}"
    if shape.kind == "layer":
        return ResidualLayerNorm(size, shape, dtype)
    assert not shape.bias, "an RMS norm has no bias"
    return RMSNorm(size, shape.eps, dtype, shape.offset)


class PerHeadNorm(Layer):
    """Norms of queries and keys side by side in one call: the weights are repeated for each head."""

    def __init__(
        self, num_heads: Mapping[str, int], head_dim: int, eps: float, dtype: torch.dtype, offset: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = dict(num_heads)
        self.eps = eps
        self.offset = offset
        self.weight = new_parameter(sum(self.num_heads.values()), head_dim, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [T, heads of all kinds, head dim]."""
        return rms_norm(x, self.weight, self.eps)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        first = 0
        for kind, count in self.num_heads.items():
            yield f"{kind}.weight", WeightTarget((self.weight.shape[1],), partial(self._fill, first, count))
            first += count

    def _fill(self, first: int, count: int, piece: CheckpointTensor) -> None:
        self.weight[first : first + count].copy_(_shifted(piece, self.offset))


class EachHeadLayerNorm(Layer):
    """A layer norm of each head of queries and keys, with weights for each head."""

    def __init__(
        self,
        num_heads: Mapping[str, int],
        eps: float,
        order: list[int],
        is_apart: bool,
        dtype: torch.dtype,
        stored: Mapping[str, StoredPart],
    ) -> None:
        """`order`: of a head, the checkpoint's number for each number. `is_apart`: a checkpoint tensor per head.
        `stored`: the heads of a rank that has some, by kind; empty: it has all."""
        super().__init__()
        self.num_heads, self.eps, self.order, self.is_apart = dict(num_heads), eps, order, is_apart
        self.stored_parts = None if is_apart or not stored else dict(stored)
        self._stored = dict(stored)
        self.weight = new_parameter(sum(self.num_heads.values()), len(order), dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [T, heads of all kinds, head dim]."""
        return F.layer_norm(x, x.shape[-1:], None, None, self.eps).mul_(self.weight)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        first, size = 0, len(self.order)
        for kind, count in self.num_heads.items():
            if self.is_apart:
                part = self._stored.get(kind, StoredPart(((0, count),), count))
                first_stored = part.ranges[0][0]
                for head in range(part.total):
                    own = head - first_stored
                    fill = partial(self._fill, first + own, 1) if 0 <= own < count else _skip
                    yield f"{kind}.{head}.weight", WeightTarget((size,), fill)
            else:
                yield f"{kind}.weight", WeightTarget((count, size), partial(self._fill, first, count))
            first += count

    def _fill(self, first: int, count: int, piece: CheckpointTensor) -> None:
        self.weight[first : first + count].copy_(piece.read().view(count, -1)[:, self.order])


class AllHeadsNorm(Layer):
    """One norm over all heads of the queries, one over all heads of the keys."""

    def __init__(self, num_heads: Mapping[str, int], head_dim: int, norm: NormShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = dict(num_heads)
        for kind, count in self.num_heads.items():
            self.add_module(kind, new_norm(count * head_dim, norm, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [T, heads of all kinds, head dim]."""
        parts = x.split(list(self.num_heads.values()), 1)
        normed = [norm(part.flatten(1))[0] for norm, part in zip(self.children(), parts, strict=True)]
        return torch.cat(normed, 1).view(x.shape)


def _skip(piece: CheckpointTensor) -> None:
    """Ignore a tensor of a head that another rank has."""


def _shifted(piece: CheckpointTensor, offset: float) -> torch.Tensor:
    """Added in float32 at least: 1 + weight in bfloat16 would be rounded twice."""
    weight = piece.read()
    return weight if offset == 0.0 else weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset


# Norms and statistics over numbers of which each rank has a part: their sums are exchanged, not the numbers.


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
