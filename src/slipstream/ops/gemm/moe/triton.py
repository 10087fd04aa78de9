"""Grouped GEMMs of experts on CUDA: a program multiplies a tile of one expert's tokens with a block of its outputs.

A tile reads only the weights of its expert, so a step of few tokens streams only the experts that have tokens. Sums run
over the inputs in one order, and a second pass adds a token's experts in routing order, without atomics: a result
depends on the batch only through the tile size.

In steps of few tokens a shared expert like the routed ones is one more expert of the same launches: its tiles come
first, and its pairs (one for each token) follow the routed ones. So a captured step is one chain of kernels, which
starts sooner than a graph with branches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.device.streams import execute_in_parallel
from slipstream.ops.gemm.moe import reference
from slipstream.ops.gemm.moe.combine import combine
from slipstream.ops.gemm.moe.gemv import can_sum, multiply_one_token, sum_one_token
from slipstream.ops.gemm.moe.quantized_gemm import multiply_quantized
from slipstream.ops.gemm.moe.reference import (
    ExpertBiases,
    ExpertMatrices,
    Gate,
    RouterRule,
    Routing,
    Shared,
    SharedMatrices,
    SharedOutput,
    count_experts,
)
from slipstream.ops.gemm.moe.sort import (
    BATCH_INVARIANT,
    GATES,
    ExpertTiles,
    GroupedTile,
    grouped_tile,
    pairs_of,
    quantized_tile,
    sort_by_expert,
    store_pairs,
)
from slipstream.ops.gemm.quantized.matrix import QuantizedExperts
from slipstream.ops.platform.dispatch import has_hopper_kernels
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

MIN_HOPPER_PAIRS = 256  # per expert, from which `gemm_hopper.py` is faster
MAX_PARALLEL_TOKENS = 256  # up to which the shared expert runs on a stream of its own
MAX_JOINED_TOKENS = 64  # up to which the shared expert is one more expert of the grouped GEMMs


def expert_mlp(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    batch_invariant: bool = False,
    biases: ExpertBiases | None = None,
    gate: Gate = "silu",
    shared: Shared | None = None,
    shared_matrices: SharedMatrices | None = None,
) -> torch.Tensor:
    """As the reference."""
    if not len(x):
        return torch.empty_like(x)
    if (
        len(x) == 1
        and (shared is None or shared_matrices is not None)
        and biases is None
        and not batch_invariant
        and isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
        and can_sum(routing, down, shared_matrices)
    ):
        return sum_one_token(x, routing, gate_up, down, gate, shared_matrices)
    if (
        shared_matrices is not None
        and len(x) <= MAX_JOINED_TOKENS
        and biases is None
        and not batch_invariant
        and isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
    ):
        made, _ = _weighted_pairs(x, routing, gate_up, down, False, None, gate, shared_matrices)
        made, own = made.split([routing.ids.numel(), len(x)])
        return combine(made, None, routing, len(gate_up), SharedOutput(own), x, shared_matrices.gate)
    return combine(*expert_pairs(x, routing, gate_up, down, batch_invariant, biases, gate, shared))


def expert_pairs(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    batch_invariant: bool,
    biases: ExpertBiases | None,
    gate: Gate,
    shared: Shared | None,
) -> tuple[torch.Tensor, torch.Tensor | None, Routing, int, SharedOutput | None]:
    """The first five arguments of `combine`: outputs of the experts, and of the shared one."""

    def run_routed() -> tuple[torch.Tensor, torch.Tensor | None]:
        is_beside = shared is not None
        return _weighted_pairs(x, routing, gate_up, down, batch_invariant, biases, gate, is_beside=is_beside)

    beside = None
    if shared is None:
        made, positions = run_routed()
    elif len(x) <= MAX_PARALLEL_TOKENS:
        (made, positions), beside = execute_in_parallel(run_routed, shared)
    else:
        (made, positions), beside = run_routed(), shared()
    return made, positions, routing, count_experts(gate_up), beside


def _weighted_pairs(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    batch_invariant: bool,
    biases: ExpertBiases | None,
    gate: Gate,
    shared: SharedMatrices | None = None,
    is_beside: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs of the experts times their weights, and the row of each pair (None: in order). Pairs of no expert have no
    values. After them those of the shared expert, if it is given. `is_beside`: other kernels run at the same time."""
    num_tokens, top_k = routing.ids.shape
    num_experts = count_experts(gate_up)
    each = num_tokens * top_k / num_experts  # mean pairs per expert
    if (
        each >= MIN_HOPPER_PAIRS
        and shared is None
        and not batch_invariant
        and biases is None
        and isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
        and has_hopper_kernels(x.device)
    ):
        from slipstream.ops.gemm.moe import gemm_hopper

        if gemm_hopper.can_multiply(x, gate_up, down, gate):
            whole = sort_by_expert(routing.ids, num_experts, gemm_hopper.PAIRS, padded=True)
            hidden = gemm_hopper.multiply_gate_up(x, gate_up, routing, whole, gate)
            return gemm_hopper.multiply_down(hidden, down, routing, whole), whole.positions

    if (
        not is_beside
        and not batch_invariant
        and biases is None
        and isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
        and has_hopper_kernels(x.device)
    ):
        from slipstream.ops.gemm.moe import streaming_hopper

        if streaming_hopper.takes_streaming(x, gate_up, down, gate, shared):
            return streaming_hopper.streaming_pairs(x, routing, gate_up, down, gate, shared), None

    if (
        num_tokens == 1
        and not batch_invariant
        and biases is None
        and isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
    ):
        return multiply_one_token(x, routing, gate_up, down, gate, shared), None

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
    num_pairs = num_tokens * (top_k if shared is None else top_k + 1)
    hidden = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    gate_up_bias, down_bias = (None, None) if biases is None else biases
    own = (None, None) if shared is None else (shared.gate_up, shared.down)
    _multiply(x, gate_up, gate_up_bias, hidden, routing, tiles, inward, gate, batch_invariant, own[0])
    made = torch.empty(num_pairs, x.shape[1], dtype=x.dtype, device=x.device)
    _multiply(hidden, down, down_bias, made, routing, tiles, outward, None, batch_invariant, own[1])
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
    shared: torch.Tensor | None = None,
) -> None:
    """With a gate: gate and up (or up), from tokens into sorted rows; else down, from sorted rows to pairs, weighted.
    `tiles` None: one token, whose pairs are not sorted. `shared`: the matrix of the shared expert."""
    if isinstance(weight, QuantizedExperts):
        multiply_quantized(x, weight, bias, out, routing, tiles, tile, gate, batch_invariant)
        return
    num_out, num_in = out.shape[1], x.shape[1]
    assert weight.stride(2) == 1 and x.stride(1) == 1, "inputs must be contiguous"
    order, table = (None, routing.ids) if tiles is None else (tiles.order, tiles.table)
    num_tiles = table.shape[1]
    num_shared = 0 if shared is None else triton.cdiv(len(routing.ids), tile.pairs)
    assert shared is None or shared.stride() == weight.stride()[1:]
    _grouped_kernel[(num_shared + num_tiles, triton.cdiv(num_out, tile.outputs))](
        x,
        weight,
        shared,
        bias,
        out,
        order,
        table,
        None if gate else routing.weights,
        num_out,
        num_in,
        num_tiles,
        num_shared,
        len(routing.ids),
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
    shared,
    bias,
    out,
    order,
    table,
    pair_weights,
    num_out,
    num_in,
    num_tiles,
    num_shared,
    num_tokens,
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
    tile = tl.program_id(0) - num_shared
    wait_for_previous(DEPENDENT)
    expert = tl.load(table + tile, mask=tile >= 0, other=0)
    if (expert < 0) | (expert >= num_experts):
        return
    index, there, pair = pairs_of(tile, order, table, num_tiles, PAIRS)
    source = pair // TOP_K if INWARD else index
    num_routed = num_tokens * TOP_K
    if shared is not None:
        token = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
        is_own = tile < 0
        there = tl.where(is_own, token < num_tokens, there)
        index = tl.where(is_own, num_routed + token, index)
        pair = tl.where(is_own, num_routed + token, pair)
        source = tl.where(is_own, token if INWARD else num_routed + token, source)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < num_out
    k = tl.arange(0, INPUTS)
    rows = x + tl.where(there, source, 0).to(tl.int64)[:, None] * x_stride + k[None, :]
    matrix = weight + expert.to(tl.int64) * expert_stride
    if shared is not None:
        matrix = tl.where(tile < 0, shared, matrix)
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
    sums, pairs, weights = (total, ups), (index, there, pair), (pair_weights, num_routed)
    store_pairs(sums, pairs, output, expert, bias, weights, out, num_out, INWARD, GATED, GATE)


# Routing on CUDA: scores, groups, top-k and weights of a token in one program.

_LEAST = tl.constexpr(-(2**31))


def route(
    logits: torch.Tensor,
    rule: RouterRule,
    bias: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    page_size: int = 0,
) -> Routing:
    """As the reference. Of equal scores the expert with the lower index is chosen."""
    num_tokens, num_experts = logits.shape
    size = num_experts // rule.num_groups
    if rule.num_groups > 1 and num_experts & (num_experts - 1) | rule.num_groups & (rule.num_groups - 1):
        return reference.route(logits, rule, bias, slots, page_size)  # the kernel needs groups of a power of two
    assert logits.stride(1) == 1 and size * rule.num_groups == num_experts
    ids = torch.empty(num_tokens, rule.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, rule.top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            bias,
            slots,
            ids,
            weights,
            num_experts,
            logits.stride(0),
            rule.scale,
            rule.epsilon,
            page_size,
            TOP_K=rule.top_k,
            PADDED_K=triton.next_power_of_2(rule.top_k),
            EXPERTS=triton.next_power_of_2(num_experts),
            SIGMOID=rule.scores == "sigmoid",
            RENORMALIZE=rule.renormalize,
            GROUPS=rule.num_groups,
            KEPT_GROUPS=rule.kept_groups,
            TOP2=rule.group_score == "top2",
            num_warps=1 if num_experts <= 128 else 4,
            **dependent(logits.device, num_tokens),
        )
    return Routing(ids, weights, has_padding=slots is not None)


# grid: (tokens,)
@triton.jit
def _route_kernel(
    logits,
    bias,
    slots,
    ids,
    weights,
    num_experts,
    stride,
    scale,
    epsilon,
    page_size,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    wait_for_previous(DEPENDENT)
    value = tl.load(logits + token * stride + expert, mask=inside, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(value)
    else:
        scores = tl.exp(value - tl.max(value, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, -float("inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        grouped = tl.reshape(choice, (GROUPS, SIZE))
        best = tl.max(grouped, 1)
        if TOP2:
            first = tl.argmax(grouped, 1)
            rest = tl.where(tl.arange(0, SIZE)[None, :] == first[:, None], -float("inf"), grouped)
            best += tl.max(rest, 1)
        group = tl.arange(0, GROUPS)
        kept = tl.zeros((GROUPS,), tl.int32)
        for _ in tl.static_range(KEPT_GROUPS):
            chosen = tl.argmax(best, 0)
            kept = tl.where(group == chosen, 1, kept)
            best = tl.where(group == chosen, -float("inf"), best)
        grouped = tl.where(kept[:, None] != 0, grouped, -float("inf"))
        choice = tl.reshape(grouped, (EXPERTS,))
    rank = tl.arange(0, PADDED_K)
    chosen_ids = tl.zeros((PADDED_K,), tl.int32)
    chosen_weights = tl.zeros((PADDED_K,), tl.float32)
    # integers in the order of the scores: a maximum of 32-bit integers is one instruction per warp
    keys = choice.to(tl.int32, bitcast=True)
    keys = tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    bits = scores.to(tl.int32, bitcast=True)
    for k in tl.static_range(TOP_K):
        largest = tl.max(keys, 0)
        top = tl.min(tl.where(keys == largest, expert, EXPERTS), 0)
        if (bias is not None) or GROUPS > 1:
            largest = tl.max(tl.where(expert == top, bits, _LEAST), 0)
        chosen_ids = tl.where(rank == k, top, chosen_ids)
        chosen_weights = tl.where(rank == k, largest.to(tl.float32, bitcast=True), chosen_weights)
        keys = tl.where(expert == top, _LEAST, keys)
    if RENORMALIZE:
        chosen_weights = chosen_weights / (tl.sum(chosen_weights, 0) + epsilon)
    if slots is not None:
        is_padding = tl.load(slots + token) < page_size
        chosen_ids = tl.where(is_padding, num_experts, chosen_ids)
        chosen_weights = tl.where(is_padding, 0.0, chosen_weights)
    tl.store(ids + token * TOP_K + rank, chosen_ids, mask=rank < TOP_K)
    tl.store(weights + token * TOP_K + rank, chosen_weights * scale, mask=rank < TOP_K)


__all__ = ["expert_mlp", "route"]
