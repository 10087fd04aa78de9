"""One token through its experts: GEMV, one program for some outputs of one expert.

Gate and up let the next kernel start only after their own wait, when routing is complete. So down may read the chosen
experts and load its weights before it waits for gate and up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.moe.reference import Gate, Routing, SharedMatrices
from slipstream.ops.gemm.moe.sort import GATES, store_pairs
from slipstream.ops.platform.dispatch import multiprocessors
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

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


# Gate and up of one token's small experts on CUDA: GEMV, one program for an output of all experts.
#
# One wave of programs stays on the GPU. As in `ops/gemm/linear/gemv.py`, weights are loaded ahead in an
# unrolled loop, here those of some experts. The shared expert is the first: its weights are loaded before routing is
# complete. With larger experts the many programs of `gemv.py` are faster.

PROGRAMS = 4  # per multiprocessor at most: registers are for as many
WARPS = 4
AHEAD = 4  # experts
MAX_PAIRS = 16  # each is code of its own


def is_one_wave(num_pairs: int, size: int, num_in: int, gate: Gate, device: torch.device) -> bool:
    """Whether these programs are faster: one wave of them fills the GPU. `size`: outputs of an expert. H200, steps of
    Qwen3-Next-mini: 11 experts of 512 outputs, 0.732 ms instead of 0.756."""
    wave = PROGRAMS * multiprocessors(device)
    is_measured = gate != "relu2" and 1024 < num_in <= 2048 and num_pairs <= MAX_PAIRS
    return is_measured and 9 * wave < 10 * size <= 10 * wave


def multiply_gate_up(
    x: torch.Tensor,  # [1, in]
    weight: torch.Tensor,  # [experts, 2 * size, in]
    shared: torch.Tensor | None,  # [2 * size, in]
    out: torch.Tensor,  # [pairs, size], with one more pair for the shared expert
    routing: Routing,
    gate: Gate,
) -> None:
    """Gate and up of the only token, with the activation. Rows of `out` of no expert are zeros."""
    size = out.shape[1]
    assert weight.stride(2) == 1 and x.stride(1) == 1, "inputs must be contiguous"
    assert shared is None or shared.stride() == weight.stride()[1:]
    _gate_up_kernel[(size,)](
        x,
        weight,
        shared,
        out,
        routing.ids,
        size,
        len(weight),
        weight.stride(0),
        weight.stride(1),
        IN=x.shape[1],
        INPUTS=triton.next_power_of_2(x.shape[1]),
        TOP_K=routing.ids.shape[1],
        GATE=GATES.index(gate),
        AHEAD=AHEAD,
        num_warps=WARPS,
        **dependent(x.device, 1),
    )


# grid: (outputs of an expert,)
@triton.jit
def _gate_up_kernel(
    x,
    weight,
    shared,
    out,
    ids,
    size,
    num_experts,
    expert_stride,
    weight_stride,
    IN: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATE: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    NUM_SHARED: tl.constexpr = 0 if shared is None else 1
    PAIRS: tl.constexpr = TOP_K + NUM_SHARED
    # the gate row and the up row of this output
    row = tl.program_id(0) + tl.arange(0, 2) * size
    k = tl.arange(0, INPUTS)[None, :]
    offset = row.to(tl.int64)[:, None] * weight_stride + k
    loaded = ()
    if NUM_SHARED:
        rows = tl.load(shared + offset, mask=k < IN, other=0.0, eviction_policy="evict_first")
        loaded = loaded + (rows,)  # type: ignore[assignment]
    wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)
    for turn in tl.static_range(NUM_SHARED, AHEAD):
        if turn < PAIRS:
            rows = _load_expert(weight, ids + (turn - NUM_SHARED), num_experts, expert_stride, offset, k < IN)
            loaded = loaded + (rows,)  # type: ignore[assignment]
    value = tl.load(x + k, mask=k < IN, other=0.0).to(tl.float32)
    output = tl.program_id(0) + tl.arange(0, 1)
    for turn in tl.static_range(PAIRS):
        if turn + AHEAD < PAIRS:
            later = ids + (turn + AHEAD - NUM_SHARED)
            rows = _load_expert(weight, later, num_experts, expert_stride, offset, k < IN)
            loaded = loaded + (rows,)  # type: ignore[assignment]
        gate, up = tl.split(tl.reshape(tl.sum(loaded[turn].to(tl.float32) * value, 1), (1, 1, 2)))
        pair = (TOP_K if turn < NUM_SHARED else turn - NUM_SHARED) + tl.arange(0, 1)
        pairs = (pair, pair >= 0, pair)
        store_pairs((gate, up), pairs, output, pair, None, (None, None), out, size, True, True, GATE)


@triton.jit
def _load_expert(weight, ids, num_experts, expert_stride, offset, is_input):
    """Two rows of the expert at `ids`; zeros for no expert."""
    # the L1 cache may have the experts of an earlier layer
    expert = tl.load(ids, cache_modifier=".cg").to(tl.int64)
    is_used = (expert >= 0) & (expert < num_experts)
    rows = weight + expert * expert_stride + offset
    return tl.load(rows, mask=is_input & is_used, other=0.0, eviction_policy="evict_first")


# Down of one token's experts on CUDA, and the sum over them: GEMV, one program for some outputs of all experts.
#
# Gate and up let this kernel start when routing is complete. So a program reads the chosen experts and loads all of its
# weights before it waits for gate and up. A warp has an output, so that nothing passes between warps.

OUTPUTS = 4  # per program, and warps
INPUTS = 256  # per load: 16 bytes for each thread of a warp
_MAX_LOADS = 24  # of a thread, each of which takes four registers
_REGISTERS = 128  # four programs on a multiprocessor, so that 2,048 outputs are one wave


def can_sum(routing: Routing, down: torch.Tensor, shared: SharedMatrices | None) -> bool:
    num_pairs = routing.ids.numel() + (shared is not None)
    return (
        down.element_size() == 2
        and down.stride(2) == 1
        and num_pairs * triton.cdiv(down.shape[2], INPUTS) <= _MAX_LOADS
        and (shared is None or shared.down.stride() == down.stride()[1:])
    )


def sum_one_token(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: Gate,
    shared: SharedMatrices | None,
) -> torch.Tensor:
    """[1, hidden]: the sum of the experts of the only token, and of the shared one, if `can_sum`."""
    hidden = gate_up_of_one(x, routing, gate_up, down.shape[2], gate, shared)
    return multiply_down(hidden, x, routing, down, shared)


def multiply_down(
    hidden: torch.Tensor, x: torch.Tensor, routing: Routing, down: torch.Tensor, shared: SharedMatrices | None
) -> torch.Tensor:
    """[1, hidden size]: the sum of the experts' outputs times their weights, from the activations hidden [pairs, inner]
    of the only token x; and of the shared expert, whose activations are the last row."""
    num_out, num_in = down.shape[1:]
    gate = None if shared is None else shared.gate
    assert hidden.is_contiguous() and (gate is None or x.stride(1) == gate.stride(1) == 1)
    out = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    _down_kernel[(triton.cdiv(num_out, OUTPUTS),)](
        hidden,
        down,
        None if shared is None else shared.down,
        None if gate is None else x,
        gate,
        out,
        routing.ids,
        routing.weights,
        num_out,
        len(down),
        down.stride(0),
        down.stride(1),
        IN=num_in,
        TOP_K=routing.ids.shape[1],
        BLOCKS=triton.cdiv(num_in, INPUTS),
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        HIDDEN=triton.next_power_of_2(num_out),
        num_warps=OUTPUTS,
        maxnreg=_REGISTERS,
        **dependent(x.device, 1),
    )
    return out


# grid: (blocks of outputs,)
@triton.jit
def _down_kernel(
    hidden,
    weight,
    shared,
    x,
    gate,
    out,
    ids,
    pair_weights,
    num_out,
    num_experts,
    expert_stride,
    weight_stride,
    IN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    PAIRS: tl.constexpr = TOP_K if shared is None else TOP_K + 1
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, INPUTS)
    inside = output < num_out
    offset = output.to(tl.int64)[:, None] * weight_stride + k[None, :]
    loaded = ()
    used = ()  # the activations of no expert have no values
    for pair in tl.static_range(PAIRS):
        if pair < TOP_K:
            # the L1 cache may have the experts of an earlier layer
            expert = tl.load(ids + pair, cache_modifier=".cg").to(tl.int64)
            is_used = (expert >= 0) & (expert < num_experts)
            matrix = weight + expert * expert_stride
        else:
            is_used = num_out > 0
            matrix = shared
        used = used + (is_used,)  # type: ignore[assignment]
        for block in tl.static_range(BLOCKS):
            mask = (inside & is_used)[:, None] & (block * INPUTS + k < IN)[None, :]
            rows = tl.load(matrix + offset + block * INPUTS, mask=mask, other=0.0, eviction_policy="evict_first")
            loaded = loaded + (rows,)  # type: ignore[assignment]
    opened = 1.0
    if gate is not None:  # x is older than gate and up
        every = tl.arange(0, HIDDEN)
        token = tl.load(x + every, mask=every < num_out, other=0.0, cache_modifier=".cg").to(tl.float32)
        by = tl.load(gate + every, mask=every < num_out, other=0.0).to(tl.float32)
        opened = tl.sigmoid(tl.sum(token * by, 0).to(out.dtype.element_ty).to(tl.float32))
    wait_for_previous(DEPENDENT)
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    # every warp loads all inputs for itself: a conversion of layouts would be two barriers for each load
    source = hidden + tl.zeros((OUTPUTS, 1), tl.int32) + k[None, :]
    for pair in tl.static_range(PAIRS):
        factor = opened
        if pair < TOP_K:
            factor = tl.load(pair_weights + pair)
        for block in tl.static_range(BLOCKS):
            mask = ((block * INPUTS + k < IN) & used[pair])[None, :]
            value = tl.load(source + (pair * IN + block * INPUTS), mask=mask, other=0.0).to(tl.float32)
            total += loaded[pair * BLOCKS + block].to(tl.float32) * (value * factor)
    result = tl.sum(total, 1)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=inside)
