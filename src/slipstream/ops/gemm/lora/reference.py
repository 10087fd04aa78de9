"""LoRA in plain torch: tokens are grouped by adapter, two GEMMs for each adapter that has tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.config.memory import FEW_ADAPTED
from slipstream.device.sync_check import sync_allowed
from slipstream.ops.elementwise import gelu_tanh_and_mul, rms_norm, silu_and_mul
from slipstream.ops.gemm.chains import Unnormalized


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """The tokens of a step, sorted by adapter and cut into tiles of one adapter each; tokens without come last.

    Made on the host by `ops/gemm/lora/reference.py`. Shapes depend on the size of the step only, so captured work can
    read them.
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


# Sorts the tokens of a step by adapter and cuts them into tiles, on the host; and outputs of a product into blocks.

Ints = np.ndarray[Any, np.dtype[np.int32]]

BLOCK = 128
"""Outputs that one program of the expand kernel computes."""
FEW_TOKENS = FEW_ADAPTED
"""Up to this many tokens, tiles are small and the inputs of A are split over programs: such steps wait for weights."""
MAX_COLUMNS = 64
"""Columns of A, or inputs of B, of one product of a kernel."""


def tile_size(num_tokens: int) -> int:
    """Tokens per tile in a step of `num_tokens` tokens, padding included."""
    return 16 if num_tokens <= FEW_TOKENS else 64


def num_tiles(num_tokens: int, num_slots: int) -> int:
    """Maximum number of tiles of a step: each slot, and the tokens without one, may have one that is not full."""
    return min(num_tokens, num_tokens // tile_size(num_tokens) + num_slots + 1)


def num_counters(num_columns: int, num_slots: int) -> int:
    """Groups of programs that split the inputs of a matrix A with `num_columns` columns, in the largest such step."""
    return num_tiles(FEW_TOKENS, num_slots) * -(-num_columns // min(num_columns, MAX_COLUMNS))


def make_tiles(slots: Ints, counts: Ints, num_tokens: int, num_slots: int) -> tuple[Ints, Ints]:
    """`order` and `tiles` of `LoraTiles`. `slots`: per row, the slot of its adapter, -1: none. `counts`: tokens of each
    row, which lie row after row. `num_tokens`: of the step, padding included."""
    size = tile_size(num_tokens)
    tiles = np.full((num_tiles(num_tokens, num_slots), 3), -1, np.int32)
    by_token = np.full(num_tokens, -1, np.int16)  # padding has no adapter
    by_token[: counts.sum()] = np.repeat(slots, counts)
    # without an adapter last: -1 is the largest unsigned number; 16 bits are sorted by radix
    order = np.argsort(by_token.view(np.uint16), kind="stable").astype(np.int32)
    by_token = by_token[order]
    firsts: Ints = np.flatnonzero(np.diff(by_token, prepend=-2)).astype(np.int32)
    borders = [*firsts.tolist(), len(by_token)]
    used = 0
    for first, end in zip(borders[:-1], borders[1:], strict=True):
        begins = np.arange(first, end, size)
        own = tiles[used : used + len(begins)]
        own[:, 0], own[:, 1], own[:, 2] = by_token[first], begins, np.minimum(begins + size, end)
        used += len(begins)
    return order, tiles


def make_blocks(runs: Sequence[tuple[int, int, int]]) -> Ints:
    """Runs of outputs cut into blocks of at most BLOCK: (first output, end, index of the matrix A)."""
    blocks = [(at, min(at + BLOCK, end), matrix) for first, end, matrix in runs for at in range(first, end, BLOCK)]
    return np.array(blocks, np.int32)


@cache
def has_paired_blocks(runs: tuple[tuple[int, int, int], ...]) -> bool:
    """Whether the second half of the blocks has the outputs that follow those of the first half in the same order, as
    the up rows of a gated product follow the gate rows."""
    bounds = make_blocks(runs)[:, :2]
    half, rest = len(bounds) // 2, len(bounds) % 2
    return not rest and bool((bounds[half:] == bounds[:half] + runs[-1][1] // 2).all())
