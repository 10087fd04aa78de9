"""Norms of decoders: of a hidden state, of each head of queries and keys, or of all their heads together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.layer_norm import LayerNorm
from slipstream.nn.shapes import NormShape
from slipstream.nn.weight_format import CheckpointTensor, StoredPart, WeightTarget, new_parameter
from slipstream.ops.norm import add_rms_norm, rms_norm


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
