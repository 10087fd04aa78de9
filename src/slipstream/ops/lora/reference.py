"""LoRA in plain torch: tokens are grouped by adapter, two GEMMs for each adapter that has tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.device.sync_check import sync_allowed


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """The tokens of a step that have an adapter, sorted by adapter and cut into tiles of one adapter each.

    Made on the host by `ops/lora/tiles.py`. Shapes depend on the size of the step only, so captured work can read them.
    """

    order: torch.Tensor  # [T] int32, indices of tokens; those with an adapter come first, sorted by slot
    tiles: torch.Tensor  # [N, 3] int32: slot, first and end of the tile's tokens in `order`; slot -1: an unused tile
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

    @property
    def inner_size(self) -> int:
        """Outputs of one matrix A: the rank, padded."""
        return self.b.shape[2]


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, tiles: LoraTiles) -> torch.Tensor:
    """out [T, outputs] += B A x of the adapter of each token, in place. x [T, inputs]. Returns `out`."""
    for slot, tokens in _by_slot(tiles):
        inner = F.linear(x.index_select(0, tokens), weights.a[slot])
        _expand(out, inner, weights, slot, tokens)
    return out


def add_lora_embedding(
    out: torch.Tensor, ids: torch.Tensor, weights: LoraWeights, tiles: LoraTiles, scale: float
) -> torch.Tensor:
    """out [T, hidden] += scale * B A, with the column of A that belongs to each token id, in place. ids [T]."""
    for slot, tokens in _by_slot(tiles):
        inner = weights.a[slot].index_select(0, ids.index_select(0, tokens)) * scale
        _expand(out, inner, weights, slot, tokens)
    return out


def _expand(out: torch.Tensor, inner: torch.Tensor, weights: LoraWeights, slot: int, tokens: torch.Tensor) -> None:
    size = weights.inner_size
    parts = [
        F.linear(inner[:, matrix * size : (matrix + 1) * size], weights.b[slot, first:end])
        for first, end, matrix in weights.runs
    ]
    out.index_add_(0, tokens, torch.cat(parts, 1))


def _by_slot(tiles: LoraTiles) -> list[tuple[int, torch.Tensor]]:
    """The slots that have tokens, and the tokens of each."""
    assert not tiles.tiles.is_cuda, "the reference reads the tiles on the host"
    spans: dict[int, tuple[int, int]] = {}
    with sync_allowed("the tiles lie on the CPU, as all tensors here"):
        for slot, first, end in tiles.tiles.tolist():
            if slot >= 0:  # the tiles of a slot are adjacent
                spans[slot] = (spans.get(slot, (first, end))[0], end)
    return [(slot, tiles.order[first:end].to(torch.int64)) for slot, (first, end) in spans.items()]
