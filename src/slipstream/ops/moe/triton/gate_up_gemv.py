"""Gate and up of one token's small experts on CUDA: GEMV, one program for an output of all experts.

One wave of programs stays on the GPU. As in `ops/linear/triton/persistent_gemv.py`, weights are loaded ahead in an
unrolled loop, here those of some experts. The shared expert is the first: its weights are loaded before routing is
complete. With larger experts the many programs of `gemv.py` are faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.device_limits import multiprocessors
from slipstream.ops.moe.reference import Gate, Routing
from slipstream.ops.moe.triton.pairs import GATES, store_pairs
from slipstream.ops.pdl import dependent, release_next, wait_for_previous

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
