"""Down of one token's experts on CUDA, and the sum over them: GEMV, one program for some outputs of all experts.

Gate and up let this kernel start when routing is complete. So a program reads the chosen experts and loads all of its
weights before it waits for gate and up. A warp has an output, so that nothing passes between warps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.moe.reference import Gate, Routing, SharedMatrices
from slipstream.ops.moe.triton.gemv import gate_up_of_one
from slipstream.ops.pdl import dependent, release_next, wait_for_previous

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
