"""Experts of up to 16 tokens on Hopper: both grouped GEMMs stream their weights by TMA.

Such a step takes the time of the bytes of the experts that it touches. All tokens are columns of each expert's product
with a block of weight rows as the left operand: nothing is gathered or sorted, and results of tokens that have other
experts are dropped. A program stays on its multiprocessor: its producer warp loads the next block while the consumer
warps finish the last. Written in Gluon: `tests/ops/test_kernels_compile.py` compiles it, `pytest -m cuda` runs it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.gemm.moe.reference import Routing, SharedMatrices
from slipstream.ops.gemm.moe.sort import sort_by_expert
from slipstream.ops.platform.dispatch import multiprocessors
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

ROWS = gl.constexpr(16)  # tokens, padded
WIDTH = gl.constexpr(64)  # inputs per TMA copy: 128 bytes
FETCH_REGISTERS = gl.constexpr(40)
MEMORY = 205 << 10  # bytes of shared memory for the pipeline
GATES = {"silu": 1, "gelu_tanh": 2}
COPIES = gl.constexpr(2)  # per stage of the pipeline
GATE_UP_OUTPUTS, DOWN_OUTPUTS = 64, 128  # weight rows of a block; of gate and up: half of them each
MAX_INNER = 512  # of experts for which this is faster than `gemm.py` with more than MAX_TOKENS_OF_LARGE tokens
MAX_TOKENS_OF_LARGE = 8


def takes_streaming(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, gate: str, shared: SharedMatrices | None
) -> bool:
    """Whether this is faster than `gemm.py`, the sizes are multiples of the block, and TMA can load the operands. On
    the H200 a layer of 128 experts of 768 takes 199.8 us for 16 tokens and 132.6 for 8, by `gemm.py` 197.2 and 135.8.
    """
    matrices = [gate_up, down] + ([] if shared is None else [shared.gate_up, shared.down])
    most = ROWS.value if down.shape[2] <= MAX_INNER else MAX_TOKENS_OF_LARGE
    return (
        1 < len(x) <= most
        and gate in GATES
        and x.shape[1] % DOWN_OUTPUTS == down.shape[2] % (WIDTH.value * COPIES.value) == 0
        and x.dtype is torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and all(m.dtype is x.dtype and m.is_contiguous() and m.data_ptr() % 16 == 0 for m in matrices)
    )


def streaming_pairs(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: str,
    shared: SharedMatrices | None,
) -> torch.Tensor:
    """[pairs, hidden]: outputs of the experts times their weights, and after them those of the shared expert."""
    num_tokens, top_k = routing.ids.shape
    (num_experts, hidden, inner), num_shared = down.shape, int(shared is not None)
    # an expert has at most as many tokens as a tile: the first row of the table lists the experts
    used = sort_by_expert(routing.ids, num_experts, ROWS.value).table[0]
    made = torch.empty((num_shared + len(used)) * ROWS.value, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_tokens * (top_k + num_shared), hidden, dtype=x.dtype, device=x.device)
    own = (None, None) if shared is None else (shared.gate_up, shared.down)
    _launch(x, gate_up, own[0], made, routing, used, GATES[gate])
    _launch(made, down, own[1], out, routing, used, 0)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    used: torch.Tensor,
    gate: int,
) -> None:
    """`gate` 0: down, from the activations of slots to pairs; others: gate and up, from tokens to slots. A slot is the
    shared expert, or an entry of `used`."""
    num_tokens, top_k = routing.ids.shape
    outputs = GATE_UP_OUTPUTS if gate else DOWN_OUTPUTS
    blocks, steps = weight.shape[1] // outputs, x.shape[1] // (WIDTH.value * COPIES.value)
    num_slots = (shared is not None) + len(used)
    stages = MEMORY // ((outputs + ROWS.value) * WIDTH.value * COPIES.value * 2)
    rows = outputs // 2 if gate else outputs
    _streaming_kernel[(min(multiprocessors(x.device), num_slots * blocks),)](
        _describe(x, ROWS.value),
        _describe(weight.flatten(0, 1), rows),
        None if shared is None else _describe(shared, rows),
        out,
        routing.ids,
        routing.weights,
        used,
        num_tokens,
        out.shape[1],
        weight.shape[1],
        steps,
        num_slots,
        blocks,
        TOP_K=top_k,
        GATE=gate,
        OUTPUTS=outputs,
        STAGES=stages,
        AHEAD=max(1, stages // steps),
        num_warps=outputs // 16,
        maxnreg=128,
        **dependent(x.device, num_tokens),
    )


def _describe(matrix: torch.Tensor, rows: int) -> Any:
    box = [rows, WIDTH.value]
    return TensorDescriptor.from_tensor(matrix, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16))


# grid: (multiprocessors,), persistent over (slot, block of outputs)
@gluon.jit(do_not_specialize=["num_tokens", "num_slots"])
def _streaming_kernel(
    x,  # descriptor, boxes of ROWS x WIDTH: tokens, or the activations of slots
    weight,  # descriptor, the rows of all experts
    shared,  # descriptor, of the shared expert; None if there is none
    out,
    ids,
    pair_weights,
    used,  # the experts of slots after the shared one; -1: none
    num_tokens,
    num_out,
    expert_rows,
    num_steps,
    num_slots,
    blocks,
    TOP_K: gl.constexpr,
    GATE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,  # items of which down loads weights before gate and up are complete
    DEPENDENT: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, WIDTH], x.dtype)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES * COPIES, OUTPUTS, WIDTH], LAYOUT)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * COPIES, ROWS, WIDTH], LAYOUT)
    sums = gl.allocate_shared_memory(gl.float32, [OUTPUTS, ROWS], gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(there.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    tiles = (ws, xs, there, free)
    shape = (num_out, expert_rows, num_steps, num_slots, blocks)
    OWN: gl.constexpr = 0 if shared is None else 1
    KIND: gl.constexpr = (GATE, OUTPUTS, STAGES, AHEAD, OWN)
    pairs = (ids, pair_weights, num_tokens)
    gl.warp_specialize(
        [
            (_compute, (tiles, sums, out, pairs, used, shape, TOP_K, KIND, DEPENDENT)),
            (_fetch, (tiles, x, weight, shared, used, shape, KIND, DEPENDENT)),
        ],
        [1],
        [FETCH_REGISTERS],
    )


@gluon.jit
def _expert_of(slot, used, OWN: gl.constexpr, CACHE: gl.constexpr):
    """The expert of a slot, -1 if it has none; 0 for the shared expert."""
    expert = slot * 0
    if slot >= OWN:
        expert = gl.load(used + (slot - OWN), cache_modifier=CACHE)
    return expert


@gluon.jit
def _fetch(tiles, x, weight, shared, used, shape, KIND: gl.constexpr, DEPENDENT: gl.constexpr):
    """The producer warp. Down loads weights before the previous kernel is complete: the list of experts is older than
    the release of this kernel by gate and up."""
    ws, xs, there, free = tiles
    num_out, expert_rows, num_steps, num_slots, blocks = shape
    GATE: gl.constexpr = KIND[0]
    STAGES: gl.constexpr = KIND[2]
    AHEAD: gl.constexpr = KIND[3]
    OWN: gl.constexpr = KIND[4]
    program, programs = gl.program_id(0), gl.num_programs(0)
    begun = 0
    if GATE == 0:
        for number in gl.static_range(AHEAD):
            item = program + number * programs
            if item < num_slots * blocks:
                slot = item // blocks
                expert = _expert_of(slot, used, OWN, ".cg")
                if expert >= 0:
                    for step in range(gl.minimum(num_steps, STAGES)):
                        _copy_weight(tiles, weight, shared, slot, expert, item % blocks, step, begun, shape, KIND)
                        begun += 1
    wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)
    done = 0
    for item in range(program, num_slots * blocks, programs):
        slot, block = item // blocks, item % blocks
        expert = _expert_of(slot, used, OWN, "")
        if expert >= 0:
            row = 0 if GATE else slot * ROWS
            for step in range(num_steps):
                stage = done % STAGES
                if done >= begun:
                    mbarrier.wait(free.index(stage), (done // STAGES & 1) ^ 1)
                    _copy_weight(tiles, weight, shared, slot, expert, block, step, stage, shape, KIND)
                for part in gl.static_range(COPIES):
                    column = (step * COPIES + part) * WIDTH
                    target = xs.index(stage * COPIES + part)
                    tma.async_copy_global_to_shared(x, [row, column], there.index(stage), target)
                done += 1


@gluon.jit
def _copy_weight(tiles, weight, shared, slot, expert, block, step, stage, shape, KIND: gl.constexpr):
    """Starts the weight copies of one stage. The barrier of the stage counts the bytes of x too."""
    ws, xs, there, free = tiles
    num_out, expert_rows, num_steps, num_slots, blocks = shape
    bar = there.index(stage)
    mbarrier.expect(bar, COPIES * (KIND[1] + ROWS) * WIDTH * 2)
    if KIND[4]:
        if slot == 0:
            _copy_rows(shared, 0, num_out, block, step, stage, ws, bar, KIND)
        else:
            _copy_rows(weight, expert * expert_rows, num_out, block, step, stage, ws, bar, KIND)
    else:
        _copy_rows(weight, expert * expert_rows, num_out, block, step, stage, ws, bar, KIND)


@gluon.jit
def _copy_rows(matrix, first, num_out, block, step, stage, ws, bar, KIND: gl.constexpr):
    OUTPUTS: gl.constexpr = KIND[1]
    HALF: gl.constexpr = OUTPUTS // 2
    for part in gl.static_range(COPIES):
        k = (step * COPIES + part) * WIDTH
        target = ws.index(stage * COPIES + part)
        if KIND[0]:  # gate rows, and below them the up rows of the same outputs
            row = first + block * HALF
            tma.async_copy_global_to_shared(matrix, [row, k], bar, target.slice(0, HALF))
            tma.async_copy_global_to_shared(matrix, [row + num_out, k], bar, target.slice(HALF, HALF))
        else:
            tma.async_copy_global_to_shared(matrix, [first + block * OUTPUTS, k], bar, target)


@gluon.jit
def _compute(tiles, sums, out, pairs, used, shape, TOP_K: gl.constexpr, KIND: gl.constexpr, DEPENDENT: gl.constexpr):
    """The consumer warps: MMA and epilogue of each item."""
    ws, xs, there, free = tiles
    num_out, expert_rows, num_steps, num_slots, blocks = shape
    GATE: gl.constexpr = KIND[0]
    OUTPUTS: gl.constexpr = KIND[1]
    STAGES: gl.constexpr = KIND[2]
    OWN: gl.constexpr = KIND[4]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [OUTPUTS // 16, 1], [16, ROWS, 16])
    wait_for_previous(DEPENDENT)
    done = 0
    for item in range(gl.program_id(0), num_slots * blocks, gl.num_programs(0)):
        slot, block = item // blocks, item % blocks
        expert = _expert_of(slot, used, OWN, "")
        if expert >= 0:
            acc = gl.zeros([OUTPUTS, ROWS], gl.float32, MMA)
            for step in range(num_steps):
                stage = done % STAGES
                mbarrier.wait(there.index(stage), done // STAGES & 1)
                for part in gl.static_range(COPIES):
                    index = stage * COPIES + part
                    acc = warpgroup_mma(ws.index(index), xs.index(index).permute((1, 0)), acc, is_async=True)
                # the MMAs of this step are in flight, those of the previous step are complete
                acc = warpgroup_mma_wait(COPIES, deps=(acc,))
                if step > 0:
                    mbarrier.arrive(free.index((done - 1) % STAGES), count=1)
                done += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index((done - 1) % STAGES), count=1)
            gl.thread_barrier()  # the sums of the previous item have been read
            sums.store(acc)
            gl.thread_barrier()
            if GATE:
                _store_gated(sums, out, slot, block, num_out, GATE, OUTPUTS)
            else:
                _store_pairs(sums, out, pairs, slot, expert, block, num_out, TOP_K, OWN, OUTPUTS)


@gluon.jit
def _store_gated(sums, out, slot, block, num_out, GATE: gl.constexpr, OUTPUTS: gl.constexpr):
    HALF: gl.constexpr = OUTPUTS // 2
    BY_ROW: gl.constexpr = gl.BlockedLayout([HALF // 32, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    row = slot * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, BY_ROW))
    own = block * HALF + gl.arange(0, HALF, gl.SliceLayout(1, BY_ROW))
    dtype: gl.constexpr = out.dtype.element_ty
    # rounded as the output of a separate GEMM would be
    gate = sums.slice(0, HALF).load(BY_ROW).to(dtype).to(gl.float32)
    up = sums.slice(HALF, HALF).load(BY_ROW).to(dtype).to(gl.float32)
    slope = gate
    if GATE == 2:
        # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    value = (gate / (1.0 + gl.exp(-slope))).to(dtype).to(gl.float32) * up
    gl.store(out + (gl.expand_dims(row * num_out, 0) + gl.expand_dims(own, 1)), value.to(dtype))


@gluon.jit
def _store_pairs(
    sums, out, pairs, slot, expert, block, num_out, TOP_K: gl.constexpr, OWN: gl.constexpr, OUTPUTS: gl.constexpr
):
    """Stores the tokens that have this expert at their pairs, times the pairs' weights."""
    ids, pair_weights, num_tokens = pairs
    BY_ROW: gl.constexpr = gl.BlockedLayout([OUTPUTS // 32, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    PADDED_K: gl.constexpr = triton.next_power_of_2(TOP_K)
    token = gl.arange(0, ROWS, gl.SliceLayout(0, BY_ROW))
    choice = gl.expand_dims(gl.arange(0, PADDED_K, gl.SliceLayout(1, BY_ROW)), 1)
    where = gl.expand_dims(token * TOP_K, 0) + choice
    mask = (choice < TOP_K) & gl.expand_dims(token < num_tokens, 0)
    found = (gl.load(ids + where, mask=mask, other=-1) == expert) & mask
    pair = gl.max(gl.where(found, where, -1), 0)
    factor = gl.sum(gl.where(found, gl.load(pair_weights + where, mask=mask, other=0.0), 0.0), 0)
    if OWN:  # noqa: SIM102
        if slot == 0:
            pair = gl.where(token < num_tokens, num_tokens * TOP_K + token, -1)
            factor = factor * 0.0 + 1.0
    own = block * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, BY_ROW))
    value = sums.load(BY_ROW) * gl.expand_dims(factor, 0)
    target = gl.expand_dims(pair * num_out, 0) + gl.expand_dims(own, 1)
    gl.store(out + target, value.to(out.dtype.element_ty), mask=gl.expand_dims(pair >= 0, 0))
