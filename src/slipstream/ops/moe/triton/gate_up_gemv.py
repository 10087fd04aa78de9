"""Gate and up of one token's small experts by as many programs as the GPU runs at once: each has several outputs.

As `ops/linear/triton/persistent_gemv.py`: weights are loaded two outputs ahead, in an unrolled loop. With larger
experts the many programs of `gemv.py` are faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.device_limits import multiprocessors
from slipstream.ops.moe.reference import Gate, Routing
from slipstream.ops.moe.triton.pairs import GATES, store_pairs
from slipstream.ops.pdl import dependent, release_next, wait_for_previous

MAX_OUTPUTS = 512  # of an expert. H200, steps of Qwen3-Next-mini: 0.766 ms instead of 0.783; of 768: slower by 1%
PROGRAMS = 5  # per multiprocessor
WARPS = 4
MAX_BLOCKS = 10  # of a program: each is code of its own


def is_persistent(num_pairs: int, size: int, num_in: int, gate: Gate, device: torch.device) -> bool:
    """Whether these programs are faster. `size`: outputs of an expert."""
    programs = PROGRAMS * multiprocessors(device)
    is_measured = gate != "relu2" and size <= MAX_OUTPUTS and 1024 < num_in <= 2048
    return is_measured and programs < num_pairs * size <= MAX_BLOCKS * programs


def persistent_gate_up(
    x: torch.Tensor,  # [1, in]
    weight: torch.Tensor,  # [experts, 2 * size, in]
    shared: torch.Tensor | None,  # [2 * size, in]
    out: torch.Tensor,  # [pairs, size], with one more pair for the shared expert
    routing: Routing,
    gate: Gate,
) -> None:
    num_pairs, size = out.shape
    programs = min(num_pairs * size, PROGRAMS * multiprocessors(x.device))
    _persistent_kernel[(programs,)](
        x,
        weight,
        shared,
        out,
        routing.ids,
        num_pairs,
        size,
        len(weight),
        weight.stride(0),
        weight.stride(1),
        IN=x.shape[1],
        INPUTS=triton.next_power_of_2(x.shape[1]),
        TOP_K=routing.ids.shape[1],
        GATE=GATES.index(gate),
        BLOCKS=triton.cdiv(num_pairs * size, programs),
        num_warps=WARPS,
        **dependent(x.device, 1),
    )


# grid: (programs,): the outputs of a program are as far apart as there are programs
@triton.jit
def _persistent_kernel(
    x,
    weight,
    shared,
    out,
    ids,
    num_pairs,
    size,
    num_experts,
    expert_stride,
    weight_stride,
    IN: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATE: tl.constexpr,
    BLOCKS: tl.constexpr,  # outputs of a program
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)
    program, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, INPUTS)[None, :]
    strides = (expert_stride, weight_stride)
    w = _load_output(weight, shared, ids, program, num_pairs, size, num_experts, strides, k, IN, TOP_K)
    following = w
    if BLOCKS > 1:
        ahead = program + programs
        following = _load_output(weight, shared, ids, ahead, num_pairs, size, num_experts, strides, k, IN, TOP_K)
    value = tl.load(x + k, mask=k < IN, other=0.0).to(tl.float32)
    for number in tl.static_range(BLOCKS):
        item = program + number * programs
        later = following
        if number + 2 < BLOCKS:
            ahead = item + 2 * programs
            later = _load_output(weight, shared, ids, ahead, num_pairs, size, num_experts, strides, k, IN, TOP_K)
        gate, up = tl.split(tl.reshape(tl.sum(w.to(tl.float32) * value, 1), (1, 1, 2)))
        index = item // size + tl.arange(0, 1)
        output = item % size + tl.arange(0, 1)
        sums, pairs = (gate, up), (index, index < num_pairs, index)
        store_pairs(sums, pairs, output, index, None, (None, None), out, size, True, True, GATE)
        w = following
        following = later


@triton.jit
def _load_output(
    weight,
    shared,
    ids,
    item,
    num_pairs,
    size,
    num_experts,
    strides,
    k,
    IN: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """The gate row and the up row of an output; zeros for no expert, and past the last pair."""
    expert_stride, weight_stride = strides
    pair = item // size
    # the L1 cache may have the experts of an earlier layer
    expert = tl.load(ids + tl.minimum(pair, TOP_K - 1), cache_modifier=".cg").to(tl.int64)
    is_used = (expert >= 0) & (expert < num_experts)
    matrix = weight + expert * expert_stride
    if shared is not None:
        is_own = pair == TOP_K
        matrix = tl.where(is_own, shared, matrix)
        is_used = is_used | is_own
    row = item % size + tl.arange(0, 2) * size
    mask = (is_used & (pair < num_pairs)) & (k < IN)
    rows = matrix + row.to(tl.int64)[:, None] * weight_stride + k
    return tl.load(rows, mask=mask, other=0.0, eviction_policy="evict_first")
