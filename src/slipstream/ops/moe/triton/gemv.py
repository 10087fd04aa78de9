"""One token through its experts: GEMV, one program for some outputs of one expert.

Gate and up let the next kernel start only after their own wait, when routing is complete. So down may read the chosen
experts and load its weights before it waits for gate and up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.moe.reference import Gate, Routing, SharedMatrices
from slipstream.ops.moe.triton.gate_up_gemv import is_one_wave, multiply_gate_up
from slipstream.ops.moe.triton.pairs import GATES, store_pairs
from slipstream.ops.pdl import dependent, release_next, wait_for_previous

_MAX_INPUTS = 2048  # per load


class ExpertGemvTile(NamedTuple):
    outputs: int  # per program
    warps: int


def gemv_tile(is_inward: bool, num_out: int, num_in: int) -> ExpertGemvTile:
    """Measured on the H200 with 8 experts of 2,048 x 768 and 11 of 2,048 x 512."""
    if is_inward:
        return ExpertGemvTile(4 if num_out <= 512 else 2, 8)
    return ExpertGemvTile(8, 2 if num_in <= 512 else 4)


def multiply_one_token(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: Gate,
    shared: SharedMatrices | None,
) -> torch.Tensor:
    """[top_k, hidden]: outputs of the experts of the only token times their weights, and one more row for the shared
    expert, if it is given. Those of no expert have no values."""
    hidden = gate_up_of_one(x, routing, gate_up, down.shape[2], gate, shared)
    made = torch.empty(len(hidden), x.shape[1], dtype=x.dtype, device=x.device)
    _multiply(hidden, down, None if shared is None else shared.down, made, routing, None)
    return made


def gate_up_of_one(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    size: int,
    gate: Gate,
    shared: SharedMatrices | None,
) -> torch.Tensor:
    """[top_k, size]: activations of the experts of the only token, and one more row for the shared expert."""
    num_pairs = routing.ids.numel() + (shared is not None)
    hidden = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    own = None if shared is None else shared.gate_up
    if is_one_wave(num_pairs, size, x.shape[1], gate, x.device):
        multiply_gate_up(x, gate_up, own, hidden, routing, gate)
    else:
        _multiply(x, gate_up, own, hidden, routing, gate)
    return hidden


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    gate: Gate | None,
) -> None:
    """With a gate: gate and up (or up), from the token; else down, weighted."""
    (num_pairs, num_out), num_in = out.shape, x.shape[1]
    assert weight.stride(2) == 1 and x.stride(1) == 1, "inputs must be contiguous"
    assert shared is None or shared.stride() == weight.stride()[1:]
    tile = gemv_tile(gate is not None, num_out, num_in)
    _expert_gemv_kernel[(num_pairs, triton.cdiv(num_out, tile.outputs))](
        x,
        weight,
        shared,
        out,
        routing.ids,
        routing.weights,
        num_out,
        len(weight),
        weight.stride(0),
        weight.stride(1),
        IN=num_in,
        TOP_K=routing.ids.shape[1],
        INWARD=gate is not None,
        GATED=gate not in (None, "relu2"),
        GATE=GATES.index(gate or "silu"),
        OUTPUTS=tile.outputs,
        INPUTS=min(_MAX_INPUTS, triton.next_power_of_2(num_in)),
        num_warps=tile.warps,
        **dependent(x.device, 1),
    )


# grid: (pairs, blocks of outputs)
@triton.jit
def _expert_gemv_kernel(
    x,
    weight,
    shared,
    out,
    ids,
    pair_weights,
    num_out,
    num_experts,
    expert_stride,
    weight_stride,
    IN: tl.constexpr,
    TOP_K: tl.constexpr,
    INWARD: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if INWARD:
        wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)
    pair = tl.program_id(0)
    routed = tl.minimum(pair, TOP_K - 1)
    # the L1 cache may have the experts of an earlier layer
    expert = tl.load(ids + routed, cache_modifier=".cg").to(tl.int64)
    is_used = (expert >= 0) & (expert < num_experts)
    factor = 1.0
    if not INWARD:
        factor = tl.load(pair_weights + routed, cache_modifier=".cg")
    matrix = weight + expert * expert_stride
    if shared is not None:
        is_own = pair == TOP_K
        matrix = tl.where(is_own, shared, matrix)
        is_used = is_used | is_own
        factor = tl.where(is_own, 1.0, factor)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = ((output < num_out) & is_used)[:, None]
    k = tl.arange(0, INPUTS)
    start = matrix + output.to(tl.int64)[:, None] * weight_stride + k[None, :]
    below = start + num_out.to(tl.int64) * weight_stride
    # weights are loaded one block ahead, the first block of down before its input is ready
    w = tl.load(start, mask=inside & (k < IN)[None, :], other=0.0, eviction_policy="evict_first")
    up = w
    if GATED:
        up = tl.load(below, mask=inside & (k < IN)[None, :], other=0.0, eviction_policy="evict_first")
    source = x
    if not INWARD:
        wait_for_previous(DEPENDENT)
        source = x + pair * IN
    total = tl.zeros((OUTPUTS,), tl.float32)
    ups = tl.zeros((OUTPUTS,), tl.float32)
    for first in range(0, IN, INPUTS):
        following, following_up = w, up
        if IN > INPUTS:
            ahead = first + INPUTS
            mask = inside & (ahead + k < IN)[None, :]
            following = tl.load(start + ahead, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                following_up = tl.load(below + ahead, mask=mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(source + first + k, mask=first + k < IN, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(w.to(tl.float32) * value, 1)
        if GATED:
            ups += tl.sum(up.to(tl.float32) * value, 1)
        w, up = following, following_up
    if INWARD:
        index = pair + tl.arange(0, 1)
        there = (index >= 0) & is_used
        sums, pairs = (total[None, :], ups[None, :]), (index, there, index)
        store_pairs(sums, pairs, output, expert, None, (None, None), out, num_out, True, GATED, GATE)
    else:
        result = (total * factor).to(out.dtype.element_ty)
        tl.store(out + pair * num_out + output, result, mask=(output < num_out) & is_used)
