"""LoRA in plain torch: tokens are grouped by adapter, two GEMMs for each adapter that has tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.device.sync_check import sync_allowed
from slipstream.ops.activation import gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.linear.unnormalized import Unnormalized
from slipstream.ops.norm import rms_norm


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """The tokens of a step, sorted by adapter and cut into tiles of one adapter each; tokens without come last.

    Made on the host by `ops/lora/tiles.py`. Shapes depend on the size of the step only, so captured work can read them.
    """

    order: torch.Tensor  # [T] int32, indices of tokens; those with an adapter come first, sorted by slot
    # [N, 3] int32: slot, first and end of the tile's tokens in `order`; slot -1: tokens without an adapter, or none
    tiles: torch.Tensor
    size: int  # maximum number of tokens of a tile


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The adapters of one product, by slot.

    A product has several matrices A if the checkpoint stores its weight as several tensors, each with an adapter of
    its own: q, k and v. Each run of outputs uses one of them.
    """

    a: torch.Tensor  # [slots, num_matrices * rank, inputs]; of an embedding [slots, tokens, rank]
    b: torch.Tensor  # [slots, outputs, rank], multiplied by the adapter's scale
    runs: tuple[tuple[int, int, int], ...]  # (first output, end, index of its matrix A), together all outputs
    blocks: torch.Tensor | None = None  # [N, 3] int32, the runs in blocks of BLOCK outputs, for kernels on a GPU
    arrived: torch.Tensor | None = None  # [num_counters] int32 for these kernels: finished programs; 0 between launches

    @property
    def inner_size(self) -> int:
        """Outputs of one matrix A: the rank, padded."""
        return self.b.shape[2]


def shrink_lora(inputs: torch.Tensor | Unnormalized, weights: LoraWeights, tiles: LoraTiles) -> torch.Tensor:
    """A x of the adapter of each token, in the order of `tiles.order`. x [T, inputs]: the inputs, or their RMS norm."""
    x = inputs if isinstance(inputs, torch.Tensor) else rms_norm(inputs.total, inputs.norm, inputs.eps)
    inner = x.new_empty(len(x), weights.a.shape[1])
    for slot, first, end in _by_slot(tiles):
        inner[first:end] = F.linear(x.index_select(0, _tokens(tiles, first, end)), weights.a[slot])
    return inner


def expand_lora(out: torch.Tensor, inner: torch.Tensor, weights: LoraWeights, tiles: LoraTiles) -> torch.Tensor:
    """out [T, outputs] += B inner of the adapter of each token, in place. `inner`: of `shrink_lora`. Returns `out`."""
    size = weights.inner_size
    for slot, first_token, end_token in _by_slot(tiles):
        own = inner[first_token:end_token]
        parts = [
            F.linear(own[:, matrix * size : (matrix + 1) * size], weights.b[slot, first:end])
            for first, end, matrix in weights.runs
        ]
        out.index_add_(0, _tokens(tiles, first_token, end_token), torch.cat(parts, 1))
    return out


def lora_delta(inner: torch.Tensor, weights: LoraWeights, tiles: LoraTiles) -> torch.Tensor:
    """B inner of the adapter of each token [T, outputs], 0 for tokens without one. `inner`: of `shrink_lora`."""
    return expand_lora(inner.new_zeros(len(inner), weights.b.shape[1]), inner, weights, tiles)


def finish_lora(sums: torch.Tensor, weights: LoraWeights, tiles: LoraTiles, gate: str = "") -> torch.Tensor:
    """Adds B A x to a product and applies its gated activation, if it has one. `sums` [T, outputs + slots * columns]:
    the product, then A x of all slots, of which each token uses its own."""
    num_outputs, columns = weights.b.shape[1], weights.a.shape[1]
    out = sums[:, :num_outputs].clone()
    for slot, first, end in _by_slot(tiles):
        tokens = _tokens(tiles, first, end)
        own = sums.index_select(0, tokens)[:, num_outputs + slot * columns :][:, :columns]
        parts = [
            F.linear(own[:, matrix * weights.inner_size :][:, : weights.inner_size], weights.b[slot, begin:stop])
            for begin, stop, matrix in weights.runs
        ]
        out.index_add_(0, tokens, torch.cat(parts, 1))
    return {"": lambda x: x, "silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}[gate](out)


def finish_lora_add(
    sums: torch.Tensor,
    weights: LoraWeights,
    tiles: LoraTiles,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> Unnormalized:
    """residual + the product with B A x, and what the next product needs to finish its norm. `sums`: as above."""
    total = finish_lora(sums, weights, tiles) + residual
    assert weights.blocks is not None
    with sync_allowed("the blocks lie on the CPU, as all tensors here"):
        blocks = weights.blocks.tolist()
    squares = torch.stack([total[:, first:end].float().square().sum(1) for first, end, _ in blocks], 1)
    return Unnormalized(total, norm, eps, total * norm, squares)


def add_lora_embedding(
    out: torch.Tensor, ids: torch.Tensor, weights: LoraWeights, tiles: LoraTiles, scale: float
) -> torch.Tensor:
    """out [T, hidden] += scale * B A, with the column of A that belongs to each token id, in place. ids [T]."""
    inner = out.new_empty(len(ids), weights.inner_size)
    for slot, first, end in _by_slot(tiles):
        inner[first:end] = weights.a[slot].index_select(0, ids.index_select(0, _tokens(tiles, first, end))) * scale
    return expand_lora(out, inner, weights, tiles)


def _by_slot(tiles: LoraTiles) -> list[tuple[int, int, int]]:
    """The slots that have tokens, and first and end of their tokens in `order`."""
    assert not tiles.tiles.is_cuda, "the reference reads the tiles on the host"
    spans: dict[int, tuple[int, int]] = {}
    with sync_allowed("the tiles lie on the CPU, as all tensors here"):
        for slot, first, end in tiles.tiles.tolist():
            if slot >= 0:  # the tiles of a slot are adjacent
                spans[slot] = (spans.get(slot, (first, end))[0], end)
    return [(slot, first, end) for slot, (first, end) in spans.items()]


def _tokens(tiles: LoraTiles, first: int, end: int) -> torch.Tensor:
    return tiles.order[first:end].to(torch.int64)
