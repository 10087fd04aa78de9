"""Experts of a step of one token on CUDA in three kernels, from the residual sum to the sum over experts.

1. `_router_kernel`: residual add, RMS norm, router logits; the program that finishes last chooses the experts.
2. `_gate_up_kernel`: gate and up of the chosen experts, and of the shared expert.
3. `_down_kernel`: down of all of them, times their weights, summed.

One row is limited by the time to read the weights. So these are GEMVs on CUDA cores, as `linear/triton/gemv.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.linear.triton.epilogue import counters
from slipstream.ops.moe.reference import RouterRule
from slipstream.ops.moe.triton.route import score_experts
from slipstream.ops.pdl import dependent, release_next, wait_for_previous

MAX_HIDDEN = 8192  # one program holds the whole row
_ROUTER_PROGRAMS = 132  # about one for each SM of an H200


class SharedExpert(NamedTuple):
    """The weights of a shared expert with a SiLU gate."""

    gate_up: torch.Tensor  # [2 * inner, hidden]
    down: torch.Tensor  # [hidden, inner]
    gate: torch.Tensor | None  # [1, hidden]; sigmoid of its product with x scales the output


class Router(NamedTuple):
    weight: torch.Tensor  # [experts, hidden]
    rule: RouterRule
    bias: torch.Tensor | None = None  # [experts], changes the choice, never the weights
    slots: torch.Tensor | None = None  # [1] the cache slot; padding, in page 0, is routed to no expert
    page_size: int = 0


class OneTokenTile(NamedTuple):
    outputs: int  # per program; of gate and up each is a gate row and an up row
    inputs: int  # columns per load
    warps: int


GATE_UP_TILE = OneTokenTile(1, 2048, 8)
DOWN_TILE = OneTokenTile(1, 2048, 8)


def can_run(router: Router, gate_up: torch.Tensor, down: torch.Tensor, shared: SharedExpert | None) -> bool:
    """Whether the kernels take these weights: contiguous, of 16 bits, with inner sizes of a multiple of 8."""
    num_experts, hidden = router.weight.shape
    weights = [router.weight, gate_up, down, *(part for part in shared or () if part is not None)]
    groups = router.rule.num_groups
    return (
        hidden <= MAX_HIDDEN
        and down.shape[2] % 8 == 0
        and all(weight.is_contiguous() and weight.element_size() == 2 for weight in weights)
        and (groups == 1 or not (num_experts & (num_experts - 1) | groups & (groups - 1)))
    )


def experts_of_one_token(
    x: torch.Tensor,  # [1, hidden]
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    router: Router,
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden], gates first
    down: torch.Tensor,  # [experts, hidden, inner]
    shared: SharedExpert | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The MLPs with SiLU gates of norm(x + residual), routed and shared, and x + residual."""
    total = x if residual is None else torch.empty_like(x)
    normed, ids, weights = _route_normed(x, residual, norm, eps, total, router, shared)
    top_k, num_experts, hidden_size = router.rule.top_k, len(gate_up), x.shape[1]
    size, shared_size = down.shape[2], 0 if shared is None else shared.down.shape[1]
    hidden = torch.empty(top_k * size + shared_size, dtype=x.dtype, device=x.device)
    tile = GATE_UP_TILE
    sizes = dict(TOP_K=top_k, SIZE=size, SHARED_SIZE=shared_size)
    blocks = top_k * triton.cdiv(size, tile.outputs) + triton.cdiv(shared_size, tile.outputs)
    _gate_up_kernel[(blocks,)](
        normed,
        gate_up,
        None if shared is None else shared.gate_up,
        ids,
        hidden,
        num_experts,
        gate_up.stride(0),
        HIDDEN=hidden_size,
        OUTPUTS=tile.outputs,
        BLOCK=min(tile.inputs, triton.next_power_of_2(hidden_size)),
        num_warps=tile.warps,
        **sizes,
        **dependent(x.device, 1),
    )
    out = torch.empty_like(x)
    tile = DOWN_TILE
    _down_kernel[(hidden_size,)](
        hidden,
        down,
        None if shared is None else shared.down,
        ids,
        weights,
        out,
        num_experts,
        down.stride(0),
        BLOCK=min(tile.inputs, max(triton.next_power_of_2(top_k * size), 8)),
        SHARED_BLOCK=min(tile.inputs, triton.next_power_of_2(max(shared_size, 1))),
        num_warps=tile.warps,
        **sizes,
        **dependent(x.device, 1),
    )
    return out, total


def _route_normed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    total: torch.Tensor,
    router: Router,
    shared: SharedExpert | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normed x, the chosen experts [top_k] int32, and their weights [top_k + 1] float32, the shared one's last."""
    num_experts, hidden_size = router.weight.shape
    rule, gate = router.rule, None if shared is None else shared.gate
    num_logits = num_experts + (gate is not None)
    normed = torch.empty_like(x)
    logits = torch.empty(num_logits, dtype=torch.float32, device=x.device)
    ids = torch.empty(rule.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(rule.top_k + 1, dtype=torch.float32, device=x.device)
    outputs = triton.next_power_of_2(triton.cdiv(num_logits, _ROUTER_PROGRAMS))
    block = triton.next_power_of_2(hidden_size)
    _router_kernel[(triton.cdiv(num_logits, outputs),)](
        x,
        residual,
        norm,
        router.weight,
        gate,
        router.bias,
        router.slots,
        total,
        normed,
        logits,
        ids,
        weights,
        counters(router.weight),
        eps,
        num_experts,
        rule.scale,
        router.page_size,
        HIDDEN=hidden_size,
        BLOCK=block,
        OUTPUTS=outputs,
        TOP_K=rule.top_k,
        EXPERTS=triton.next_power_of_2(num_experts),
        SIGMOID=rule.scores == "sigmoid",
        RENORMALIZE=rule.renormalize,
        GROUPS=rule.num_groups,
        KEPT_GROUPS=rule.kept_groups,
        TOP2=rule.group_score == "top2",
        num_warps=4 if block <= 2048 else 8,
        **dependent(x.device, 1),
    )
    return normed, ids, weights


# grid: (blocks of logits,)
@triton.jit
def _router_kernel(
    x,
    residual,
    norm,
    router,
    shared_gate,
    bias,
    slots,
    total,
    normed,
    logits,
    ids,
    weights,
    arrived,
    eps,
    num_experts,
    scale,
    page_size,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK)
    there = k < HIDDEN
    mask = (output < num_experts)[:, None] & there[None, :]
    rows = tl.load(router + output[:, None] * HIDDEN + k[None, :], mask=mask, other=0.0).to(tl.float32)
    if shared_gate is not None:
        mask = (output == num_experts)[:, None] & there[None, :]
        rows += tl.load(shared_gate + output[:, None] * 0 + k[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(norm + k, mask=there, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    is_first = tl.program_id(0) == 0
    value = tl.load(x + k, mask=there, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + k, mask=there, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + k, rounded, mask=there & is_first)
        value = rounded.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps) * factor
    rounded = value.to(normed.dtype.element_ty)
    tl.store(normed + k, rounded, mask=there & is_first)
    logit = tl.sum(rows * rounded.to(tl.float32)[None, :], 1)
    logit = logit.to(x.dtype.element_ty).to(tl.float32)  # rounded as the output of a separate GEMM would be
    num_logits = num_experts if shared_gate is None else num_experts + 1
    tl.store(logits + output, logit, mask=output < num_logits)
    # every thread's stores are made before one of them reports
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if before == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        expert = tl.arange(0, EXPERTS)
        inside = expert < num_experts
        given = tl.load(logits + expert, mask=inside, other=-float("inf"), cache_modifier=".cg")
        scores, choice = score_experts(given, bias, expert, inside, EXPERTS, SIGMOID, GROUPS, KEPT_GROUPS, TOP2)
        rank = _ranks(choice, expert, TOP_K, EXPERTS)
        is_chosen = rank < TOP_K
        if RENORMALIZE:
            scores = scores / (tl.sum(tl.where(is_chosen, scores, 0.0), 0) + 1e-20)
        scores *= scale
        if slots is not None:
            is_padding = tl.load(slots) < page_size
            expert = tl.where(is_padding, num_experts, expert)
            scores = tl.where(is_padding, 0.0, scores)
        tl.store(ids + rank, expert, mask=is_chosen)
        tl.store(weights + rank, scores, mask=is_chosen)
        if shared_gate is not None:
            tl.store(weights + TOP_K, tl.sigmoid(tl.load(logits + num_experts, cache_modifier=".cg")))
        else:
            tl.store(weights + TOP_K, 1.0)


@triton.jit
def _ranks(choice, expert, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """The rank of each expert by descending value; of those behind the first TOP_K, any number from TOP_K on. Of equal
    values the expert with the lower index comes first."""
    if EXPERTS <= 128:
        mine, other = choice[:, None], choice[None, :]
        is_before = (other > mine) | ((other == mine) & (expert[None, :] < expert[:, None]))
        return tl.sum(is_before.to(tl.int32), 1)
    else:
        rank = tl.full((EXPERTS,), TOP_K, tl.int32)
        for k in tl.static_range(TOP_K):
            top = tl.argmax(choice, 0)
            rank = tl.where(expert == top, k, rank)
            choice = tl.where(expert == top, -float("inf"), choice)
        return rank


# grid: (blocks of inner columns of the chosen experts, then of the shared expert,)
@triton.jit
def _gate_up_kernel(
    x,
    gate_up,
    shared_gate_up,
    ids,
    hidden,
    num_experts,
    expert_stride,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED_SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    BLOCKS: tl.constexpr = (SIZE + OUTPUTS - 1) // OUTPUTS
    block = tl.program_id(0)
    # Released after the wait, so that the experts are chosen when the next kernel starts: it reads them early.
    wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)
    if block < TOP_K * BLOCKS:
        expert = tl.load(ids + block // BLOCKS)
        if expert < num_experts:
            matrix = gate_up + expert.to(tl.int64) * expert_stride
            target = hidden + block // BLOCKS * SIZE
            _gate_up_rows(x, matrix, target, block % BLOCKS, SIZE, HIDDEN, OUTPUTS, BLOCK)
    elif SHARED_SIZE:
        target = hidden + TOP_K * SIZE
        _gate_up_rows(x, shared_gate_up, target, block - TOP_K * BLOCKS, SHARED_SIZE, HIDDEN, OUTPUTS, BLOCK)


@triton.jit
def _gate_up_rows(
    x,
    matrix,
    target,
    block,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """silu(gate) * up for some inner columns of one expert."""
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = (output < SIZE)[:, None]
    k = tl.arange(0, BLOCK)[None, :]
    start = matrix + output[:, None] * HIDDEN + k
    gates = tl.zeros((OUTPUTS, BLOCK), tl.float32)
    ups = tl.zeros((OUTPUTS, BLOCK), tl.float32)
    for first in tl.static_range(0, HIDDEN, BLOCK):
        mask = inside & (first + k < HIDDEN)
        gate = tl.load(start + first, mask=mask, other=0.0, eviction_policy="evict_first")
        up = tl.load(start + SIZE * HIDDEN + first, mask=mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(x + first + k, mask=first + k < HIDDEN, other=0.0).to(tl.float32)
        gates += gate.to(tl.float32) * value
        ups += up.to(tl.float32) * value
    # rounded as the outputs of separate kernels would be
    dtype = target.dtype.element_ty
    gate = tl.sum(gates, 1).to(dtype).to(tl.float32)
    up = tl.sum(ups, 1).to(dtype).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(target + output, (gate * up).to(dtype), mask=output < SIZE)


# grid: (outputs,)
@triton.jit
def _down_kernel(
    hidden,
    down,
    shared_down,
    ids,
    weights,
    out,
    num_experts,
    expert_stride,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    output = tl.program_id(0)
    # inner columns of all chosen experts in order; 8 at a time are of one expert
    part = tl.arange(0, BLOCK // 8) * 8
    shared_k = tl.arange(0, SHARED_BLOCK)
    # the first weights are loaded before the hidden columns are ready
    w, expert = _down_weights(down, ids, output, part, num_experts, expert_stride, TOP_K, SIZE)
    if SHARED_SIZE:
        beside = tl.load(shared_down + output * SHARED_SIZE + shared_k, mask=shared_k < SHARED_SIZE, other=0.0)
    wait_for_previous(DEPENDENT)
    sums = tl.zeros((BLOCK // 8, 8), tl.float32)
    for first in tl.static_range(0, TOP_K * SIZE, BLOCK):
        at = first + part
        is_pair = expert < num_experts
        value = tl.load(hidden + at[:, None] + tl.arange(0, 8)[None, :], mask=is_pair[:, None], other=0.0)
        factor = tl.load(weights + at // SIZE, mask=is_pair, other=0.0)
        following = w
        if first + BLOCK < TOP_K * SIZE:
            following, expert = _down_weights(down, ids, output, at + BLOCK, num_experts, expert_stride, TOP_K, SIZE)
        sums += w.to(tl.float32) * (value.to(tl.float32) * factor[:, None])
        w = following
    result = tl.sum(tl.sum(sums, 1), 0)
    if SHARED_SIZE:
        added = tl.zeros((SHARED_BLOCK,), tl.float32)
        for first in tl.static_range(0, SHARED_SIZE, SHARED_BLOCK):
            at = first + shared_k
            if first:
                beside = tl.load(shared_down + output * SHARED_SIZE + at, mask=at < SHARED_SIZE, other=0.0)
            value = tl.load(hidden + TOP_K * SIZE + at, mask=at < SHARED_SIZE, other=0.0)
            added += beside.to(tl.float32) * value.to(tl.float32)
        result += tl.sum(added, 0) * tl.load(weights + TOP_K)
    tl.store(out + output, result.to(out.dtype.element_ty))


@triton.jit
def _down_weights(down, ids, output, at, num_experts, expert_stride, TOP_K: tl.constexpr, SIZE: tl.constexpr):
    """Weights of the 8 inner columns from each of `at` on, [parts, 8], and the expert of each part."""
    expert = tl.load(ids + at // SIZE, mask=at < TOP_K * SIZE, other=num_experts, cache_modifier=".cg")
    start = expert.to(tl.int64) * expert_stride + output * SIZE + at % SIZE
    source = down + start[:, None] + tl.arange(0, 8)[None, :]
    return tl.load(source, mask=(expert < num_experts)[:, None], other=0.0, eviction_policy="evict_first"), expert
