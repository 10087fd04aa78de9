"""Routing on CUDA: scores, groups, top-k and weights of a token in one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.moe import reference
from slipstream.ops.gemm.moe.reference import RouterRule, Routing
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

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
