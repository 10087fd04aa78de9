"""Grouped GEMMs of experts on CUDA: a program multiplies a tile of one expert's tokens with a block of its outputs.

A tile reads only the weights of its expert, so a step of few tokens streams only the experts that have tokens. Sums run
over the inputs in one order, and a second pass adds a token's experts in routing order, without atomics: a result
depends on the batch only through the tile size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.device.parallel import execute_in_parallel
from slipstream.ops.moe.reference import CLAMP_ALPHA, CLAMP_LIMIT, ExpertBiases, Gate, Routing, Shared
from slipstream.ops.moe.triton.combine import combine
from slipstream.ops.moe.triton.sort import ExpertTiles, sort_by_expert
from slipstream.ops.pdl import dependent, release_next, wait_for_previous


class GroupedTile(NamedTuple):
    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int


BATCH_INVARIANT = GroupedTile(64, 64, 64, 4, 4)
MAX_PARALLEL_TOKENS = 256  # up to which the shared expert runs on a stream of its own
_GATES: tuple[Gate, ...] = ("silu", "gelu_tanh", "clamped_swiglu", "relu2")  # the kernel uses the index
ALPHA, LIMIT = tl.constexpr(CLAMP_ALPHA), tl.constexpr(CLAMP_LIMIT)


def expert_mlp(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    batch_invariant: bool = False,
    biases: ExpertBiases | None = None,
    gate: Gate = "silu",
    shared: Shared | None = None,
) -> torch.Tensor:
    """As the reference."""
    if not len(x):
        return torch.empty_like(x)

    def run_routed() -> torch.Tensor:
        return _weighted_pairs(x, routing, gate_up, down, batch_invariant, biases, gate)

    if shared is None:
        return combine(run_routed(), routing, len(gate_up), None)
    if len(x) <= MAX_PARALLEL_TOKENS:
        made, beside = execute_in_parallel(run_routed, shared)
    else:
        made, beside = run_routed(), shared()
    return combine(made, routing, len(gate_up), beside)


def _weighted_pairs(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    batch_invariant: bool,
    biases: ExpertBiases | None,
    gate: Gate,
) -> torch.Tensor:
    """[tokens * top_k, hidden]: outputs of the experts times their weights. Pairs of no expert have no values."""
    num_tokens, top_k = routing.ids.shape
    each = num_tokens * top_k / len(gate_up)  # mean pairs per expert
    inward, outward = (
        BATCH_INVARIANT if batch_invariant else grouped_tile(each, is_inward, x.element_size())
        for is_inward in (True, False)
    )
    # the experts of one token differ, so that each pair is a tile
    tiles = None if num_tokens == 1 else sort_by_expert(routing.ids, len(gate_up), inward.pairs)
    hidden = torch.empty(num_tokens * top_k, down.shape[2], dtype=x.dtype, device=x.device)
    gate_up_bias, down_bias = (None, None) if biases is None else biases
    _multiply(x, gate_up, gate_up_bias, hidden, routing, tiles, inward, gate)
    made = torch.empty(num_tokens * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    _multiply(hidden, down, down_bias, made, routing, tiles, outward)
    return made


def grouped_tile(each: float, inward: bool, itemsize: int = 2) -> GroupedTile:
    """The tile for a mean number of tokens per expert, measured on the H200 at the sizes of Qwen3-30B-A3B. Tiles of
    gate and up (`inward`) and of down have the same number of pairs."""
    if each <= 0.25:
        return GroupedTile(16, 32, 128, 2, 4) if inward else GroupedTile(16, 64, 256, 4, 3)
    if each <= 8:
        return GroupedTile(16, 64, 128, 4, 4)
    if each <= 32:
        return GroupedTile(32, 64, 128, 4, 3)
    if each <= 64:
        return GroupedTile(64, 64, 64, 4, 4)
    # gate and up have two accumulators; float32 needs twice the shared memory
    return GroupedTile(128, 128, 64, 8, 3) if inward or itemsize > 2 else GroupedTile(128, 256, 64, 8, 4)


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    tiles: ExpertTiles | None,
    tile: GroupedTile,
    gate: Gate | None = None,
) -> None:
    """With a gate: gate and up (or up), from tokens into sorted rows; else down, from sorted rows to pairs, weighted.
    `tiles` None: one token, whose pairs are not sorted."""
    num_out, num_in = out.shape[1], x.shape[1]
    assert weight.stride(2) == 1 and x.stride(1) == 1, "inputs must be contiguous"
    order, table = (None, routing.ids) if tiles is None else (tiles.order, tiles.table)
    num_tiles = table.shape[1]
    _grouped_kernel[(num_tiles, triton.cdiv(num_out, tile.outputs))](
        x,
        weight,
        bias,
        out,
        order,
        table,
        None if gate else routing.weights,
        num_out,
        num_in,
        num_tiles,
        len(weight),
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        TOP_K=routing.ids.shape[1],
        INWARD=gate is not None,
        GATED=gate not in (None, "relu2"),
        GATE=_GATES.index(gate or "silu"),
        PAIRS=tile.pairs,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        EVEN=num_in % tile.inputs == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x.device, len(routing.ids)),
    )


# grid: (tiles, blocks of outputs)
@triton.jit
def _grouped_kernel(
    x,
    weight,
    bias,
    out,
    order,
    table,
    pair_weights,
    num_out,
    num_in,
    num_tiles,
    num_experts,
    x_stride,
    expert_stride,
    weight_stride,
    TOP_K: tl.constexpr,
    INWARD: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    tile = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    expert = tl.load(table + tile)
    if (expert < 0) | (expert >= num_experts):
        return
    if order is None:
        index = tile + tl.arange(0, PAIRS)
        there = index == tile
        pair = index
    else:
        index = tl.load(table + num_tiles + tile) + tl.arange(0, PAIRS)
        there = index < tl.load(table + 2 * num_tiles + tile)
        pair = tl.load(order + index, mask=there, other=0)
    source = pair // TOP_K if INWARD else index
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
            below = columns + num_out.to(tl.int64) * weight_stride  # the rows of up
            if EVEN:
                right = tl.load(below + first)
            else:
                right = tl.load(below + first, mask=(first + k < num_in)[:, None], other=0.0)
            ups = tl.dot(left, right, ups, input_precision="ieee")
    if bias is not None:
        biases = bias + expert.to(tl.int64) * (2 * num_out if GATED else num_out) + output
        total += tl.load(biases, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(biases + num_out, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # rounded as the output of a separate GEMM would be
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        up = ups.to(out.dtype.element_ty).to(tl.float32)
        if GATE == 2:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            gate = gate * tl.sigmoid(gate * ALPHA)
        elif GATE == 1:
            # 0.5 * (1 + tanh(y)) is sigmoid(2 y)
            gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        else:
            gate = gate * tl.sigmoid(gate)
        total = gate.to(out.dtype.element_ty).to(tl.float32) * up
        target = index
    elif INWARD:
        total = tl.maximum(total.to(out.dtype.element_ty).to(tl.float32), 0.0)
        total *= total
        target = index
    else:
        total *= tl.load(pair_weights + pair, mask=there, other=0.0)[:, None]
        target = pair
    where = out + target.to(tl.int64)[:, None] * num_out + output[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
