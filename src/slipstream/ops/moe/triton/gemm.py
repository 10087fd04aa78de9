"""Grouped GEMMs of experts on CUDA: a program multiplies a tile of one expert's tokens with a block of its outputs.

A tile reads only the weights of its expert, so a step of few tokens streams only the experts that have tokens. Sums run
over the inputs in one order, and a second pass adds a token's experts in routing order, without atomics: a result
depends on the batch only through the tile size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.device.parallel import execute_in_parallel
from slipstream.ops.hopper import has_hopper_kernels
from slipstream.ops.moe.reference import ExpertBiases, ExpertMatrices, Gate, Routing, Shared, count_experts
from slipstream.ops.moe.triton.combine import combine
from slipstream.ops.moe.triton.pairs import GATES, pairs_of, store_pairs
from slipstream.ops.moe.triton.quantized_gemm import multiply_quantized
from slipstream.ops.moe.triton.sort import ExpertTiles, sort_by_expert
from slipstream.ops.moe.triton.tiles import BATCH_INVARIANT, GroupedTile, grouped_tile, quantized_tile
from slipstream.ops.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.quantized.matrix import QuantizedExperts

MIN_HOPPER_PAIRS = 256  # per expert, from which `gemm_hopper.py` is faster
MAX_PARALLEL_TOKENS = 256  # up to which the shared expert runs on a stream of its own


def expert_mlp(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    batch_invariant: bool = False,
    biases: ExpertBiases | None = None,
    gate: Gate = "silu",
    shared: Shared | None = None,
) -> torch.Tensor:
    """As the reference."""
    if not len(x):
        return torch.empty_like(x)

    def run_routed() -> tuple[torch.Tensor, torch.Tensor | None]:
        return _weighted_pairs(x, routing, gate_up, down, batch_invariant, biases, gate)

    beside = None
    if shared is None:
        made, positions = run_routed()
    elif len(x) <= MAX_PARALLEL_TOKENS:
        (made, positions), beside = execute_in_parallel(run_routed, shared)
    else:
        (made, positions), beside = run_routed(), shared()
    return combine(made, positions, routing, count_experts(gate_up), beside)


def _weighted_pairs(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    batch_invariant: bool,
    biases: ExpertBiases | None,
    gate: Gate,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs of the experts times their weights, and the row of each pair (None: in order). Pairs of no expert have no
    values."""
    num_tokens, top_k = routing.ids.shape
    num_experts = count_experts(gate_up)
    each = num_tokens * top_k / num_experts  # mean pairs per expert
    if (
        each >= MIN_HOPPER_PAIRS
        and not batch_invariant
        and biases is None
        and isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
        and has_hopper_kernels(x.device)
    ):
        from slipstream.ops.moe.triton import gemm_hopper

        if gemm_hopper.can_multiply(x, gate_up, down, gate):
            whole = sort_by_expert(routing.ids, num_experts, gemm_hopper.PAIRS, padded=True)
            hidden = gemm_hopper.multiply_gate_up(x, gate_up, routing, whole, gate)
            return gemm_hopper.multiply_down(hidden, down, routing, whole), whole.positions

    def choose_tile(weight: ExpertMatrices, is_inward: bool) -> GroupedTile:
        if batch_invariant:
            return BATCH_INVARIANT
        if isinstance(weight, QuantizedExperts):
            return quantized_tile(each, is_inward)
        return grouped_tile(each, is_inward, x.element_size())

    inward, outward = choose_tile(gate_up, True), choose_tile(down, False)
    assert inward.pairs == outward.pairs, "both GEMMs use the same list of tiles"
    # the experts of one token differ, so that each pair is a tile
    tiles = None if num_tokens == 1 else sort_by_expert(routing.ids, num_experts, inward.pairs)
    size = down.matrix.num_columns if isinstance(down, QuantizedExperts) else down.shape[2]
    hidden = torch.empty(num_tokens * top_k, size, dtype=x.dtype, device=x.device)
    gate_up_bias, down_bias = (None, None) if biases is None else biases
    _multiply(x, gate_up, gate_up_bias, hidden, routing, tiles, inward, gate, batch_invariant)
    made = torch.empty(num_tokens * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    _multiply(hidden, down, down_bias, made, routing, tiles, outward, None, batch_invariant)
    return made, None


def _multiply(
    x: torch.Tensor,
    weight: ExpertMatrices,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    tiles: ExpertTiles | None,
    tile: GroupedTile,
    gate: Gate | None,
    batch_invariant: bool,
) -> None:
    """With a gate: gate and up (or up), from tokens into sorted rows; else down, from sorted rows to pairs, weighted.
    `tiles` None: one token, whose pairs are not sorted."""
    if isinstance(weight, QuantizedExperts):
        multiply_quantized(x, weight, bias, out, routing, tiles, tile, gate, batch_invariant)
        return
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
        GATE=GATES.index(gate or "silu"),
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
    index, there, pair = pairs_of(tile, order, table, num_tiles, PAIRS)
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
    store_pairs(total, ups, bias, out, pair_weights, expert, index, there, pair, output, num_out, INWARD, GATED, GATE)
