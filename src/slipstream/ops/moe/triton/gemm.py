"""Grouped products of experts on CUDA: a program multiplies a tile of one expert's tokens with some of its outputs.

A tile reads only its expert's weights, so a step of few tokens streams the touched experts alone. Sums run over the
inputs in one order, and a token's experts are added by a second pass in routing order: no atomics, so a result does
not depend on the batch beyond the tile size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.moe.reference import Routing
from slipstream.ops.moe.triton.sort import ExpertTiles, sort_by_expert


class GroupedTile(NamedTuple):
    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int


BATCH_INVARIANT = GroupedTile(64, 64, 64, 4, 4)


def expert_mlp(
    x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor, batch_invariant: bool = False
) -> torch.Tensor:
    """As the reference."""
    num_tokens, top_k = routing.ids.shape
    if not num_tokens:
        return torch.empty_like(x)
    inner = down.shape[2]
    each = num_tokens * top_k / len(gate_up)  # mean pairs of an expert
    tile = BATCH_INVARIANT if batch_invariant else grouped_tile(each)
    tiles = sort_by_expert(routing.ids, len(gate_up), tile.pairs)
    hidden = torch.empty(num_tokens * top_k, inner, dtype=x.dtype, device=x.device)
    _multiply(x, gate_up, hidden, tiles, None, top_k, tile)
    made = torch.empty(num_tokens * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    _multiply(hidden, down, made, tiles, routing.weights, 1, tile)
    return made.view(num_tokens, top_k, -1).sum(1)


def grouped_tile(each: float) -> GroupedTile:
    """By the mean number of tokens of an expert."""
    if each <= 16:
        return GroupedTile(16, 64, 128, 4, 4)
    if each <= 64:
        return GroupedTile(64, 64, 64, 4, 4)
    return GroupedTile(128, 128, 64, 8, 3)


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: ExpertTiles,
    pair_weights: torch.Tensor | None,
    top_k: int,
    tile: GroupedTile,
) -> None:
    """`pair_weights` None: gate and up, from tokens into sorted rows; else from sorted rows to pairs, weighted."""
    num_out, num_in = out.shape[1], x.shape[1]
    assert weight.stride(2) == 1 and x.stride(1) == 1, "inputs must be contiguous"
    grid = (tiles.table.shape[1], triton.cdiv(num_out, tile.outputs))
    _grouped_kernel[grid](
        x,
        weight,
        out,
        tiles.order,
        tiles.table,
        pair_weights,
        num_out,
        num_in,
        tiles.table.shape[1],
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        TOP_K=top_k,
        GATED=pair_weights is None,
        PAIRS=tile.pairs,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        EVEN=num_in % tile.inputs == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


# grid: (tiles, blocks of outputs)
@triton.jit
def _grouped_kernel(
    x,
    weight,
    out,
    order,
    table,
    pair_weights,
    num_out,
    num_in,
    max_tiles,
    x_stride,
    expert_stride,
    weight_stride,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(table + tile)
    if expert < 0:
        return
    place = tl.load(table + max_tiles + tile) + tl.arange(0, PAIRS)
    there = place < tl.load(table + 2 * max_tiles + tile)
    pair = tl.load(order + place, mask=there, other=0)
    source = pair // TOP_K if GATED else place
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < num_out
    k = tl.arange(0, INPUTS)
    rows = x + tl.where(there, source, 0).to(tl.int64)[:, None] * x_stride + k[None, :]
    matrix = weight + expert.to(tl.int64) * expert_stride
    columns = matrix + tl.where(inside, output, 0).to(tl.int64)[None, :] * weight_stride + k[:, None]
    total = tl.zeros((PAIRS, OUTPUTS), tl.float32)
    ups = tl.zeros((PAIRS, OUTPUTS), tl.float32)
    for first in range(0, num_in, INPUTS):
        if EVEN:
            left = tl.load(rows + first, mask=there[:, None], other=0.0)
            right = tl.load(columns + first)
        else:
            left = tl.load(rows + first, mask=there[:, None] & (first + k < num_in)[None, :], other=0.0)
            right = tl.load(columns + first, mask=(first + k < num_in)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        if GATED:
            up = columns + num_out.to(tl.int64) * weight_stride
            if EVEN:
                right = tl.load(up + first)
            else:
                right = tl.load(up + first, mask=(first + k < num_in)[:, None], other=0.0)
            ups = tl.dot(left, right, ups, input_precision="ieee")
    if GATED:
        # rounded as a product of its own would be
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
        total *= ups.to(out.dtype.element_ty).to(tl.float32)
        target = place
    else:
        total *= tl.load(pair_weights + pair, mask=there, other=0.0)[:, None]
        target = pair
    where = out + target.to(tl.int64)[:, None] * num_out + output[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
