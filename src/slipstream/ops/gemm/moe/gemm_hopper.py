"""Grouped GEMMs of experts with many tokens each, on Hopper: the same products as `gemm.py`, by TMA and wgmma.

A program computes tiles of 128 pairs of one expert x 256 outputs (gate and up: twice 128) with producer warps and two
consumer warpgroups of 64 pairs each, as in `gated_gemm_hopper.py`. Each expert's pairs begin at a multiple of 128 in
the sorted order, so that sorted rows are loaded and stored as whole tiles. The tokens of gate and up are gathered by
cp.async; TMA loads everything else. A warpgroup without pairs in the last tile of an expert multiplies nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.gemm.moe.reference import Routing
from slipstream.ops.gemm.moe.sort import ExpertTiles
from slipstream.ops.platform.dispatch import multiprocessors
from slipstream.ops.platform.pdl import ROWS, SIZE, STAGES, WIDTH, halves, multiply_tile

PART = gl.constexpr(64)  # columns of one store
LAG = gl.constexpr(2)  # steps between the start of a gather and the wait for it
PAIRS = 2 * ROWS.value  # per tile
# One program per multiprocessor. An even split of the registers gives 168 per thread; the producer warps give most of
# theirs to the consumers.
EVEN_REGISTERS = 168
COMPUTE_REGISTERS = gl.constexpr(232)
FETCH_REGISTERS = gl.constexpr(40)
GATES = {"silu": 1, "gelu_tanh": 2}


def can_multiply(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, gate: str) -> bool:
    """Whether the sizes are multiples of the tile and TMA can load the operands."""
    num_in, inner = x.shape[1], down.shape[2]
    return (
        gate in GATES
        and x.dtype == gate_up.dtype == down.dtype == torch.bfloat16
        and num_in % (2 * SIZE.value) == 0
        and inner % SIZE.value == 0
        and gate_up.is_contiguous()
        and down.is_contiguous()
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and (x.data_ptr() | gate_up.data_ptr() | down.data_ptr()) % 16 == 0
    )


def multiply_gate_up(
    x: torch.Tensor, gate_up: torch.Tensor, routing: Routing, tiles: ExpertTiles, gate: str
) -> torch.Tensor:
    """Gated activations in sorted order [tiles * 128, inner]. Rows without a pair have no values."""
    inner = gate_up.shape[1] // 2
    out = torch.empty(tiles.table.shape[1] * PAIRS, inner, dtype=x.dtype, device=x.device)
    _launch(x, x.stride(0), gate_up, out, tiles, routing, GATES[gate], inner, inner // SIZE.value)
    return out


def multiply_down(hidden: torch.Tensor, down: torch.Tensor, routing: Routing, tiles: ExpertTiles) -> torch.Tensor:
    """Outputs times the pairs' weights, in sorted order [tiles * 128, hidden]."""
    num_out = down.shape[1]
    out = torch.empty(len(hidden), num_out, dtype=hidden.dtype, device=hidden.device)
    _launch(_describe(hidden, PAIRS), 0, down, out, tiles, routing, 0, SIZE.value, num_out // (2 * SIZE.value))
    return out


def _launch(
    x: Any,
    x_stride: int,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: ExpertTiles,
    routing: Routing,
    gate: int,
    half: int,
    blocks: int,
) -> None:
    """`half`: distance of the two halves of a block in the rows of a weight."""
    num_tiles = tiles.table.shape[1]
    _grouped_kernel[(min(multiprocessors(out.device), num_tiles * blocks),)](
        x,
        _describe(weight.flatten(0, 1), SIZE.value),
        TensorDescriptor.from_tensor(out, [ROWS.value, PART.value], _layout(ROWS.value, PART.value)),
        tiles.order,
        tiles.table,
        routing.weights,
        x_stride,
        weight.shape[1],
        half,
        weight.shape[2] // WIDTH.value,
        num_tiles,
        blocks,
        TOP_K=routing.ids.shape[1],
        GATE=gate,
        num_warps=4,
        maxnreg=EVEN_REGISTERS,
    )


def _describe(matrix: torch.Tensor, rows: int) -> Any:
    return TensorDescriptor.from_tensor(matrix, [rows, WIDTH.value], _layout(rows, WIDTH.value))


def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


# grid: (multiprocessors,), persistent over (tile, block of outputs). GATE 0: down projection; x is a descriptor of the
# sorted rows. Others: gate and up; x points to the tokens.
@gluon.jit(do_not_specialize=["num_tiles"])
def _grouped_kernel(
    x,
    weight,
    out,
    order,
    table,
    pair_weights,
    x_stride,
    expert_rows,
    half,
    num_steps,
    num_tiles,
    blocks,
    TOP_K: gl.constexpr,
    GATE: gl.constexpr,
):
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * SIZE, WIDTH], out.dtype)
    RESULT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PART], out.dtype)
    ws = gl.allocate_shared_memory(out.dtype, [STAGES, 2 * SIZE, WIDTH], TILE)
    xs = gl.allocate_shared_memory(out.dtype, [STAGES, 2 * ROWS, WIDTH], TILE)
    results = gl.allocate_shared_memory(out.dtype, [4, ROWS, PART], RESULT)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(there.index(stage), count=2 if GATE > 0 else 1)  # TMA, and the gather
        mbarrier.init(used.index(stage), count=2)
    fence_async_shared()
    tiles = (ws, xs, there, used)
    sorted_pairs = (order, table, pair_weights)
    shape = (expert_rows, half, num_steps, num_tiles, blocks)
    gl.warp_specialize(
        [
            (_compute, (tiles, results, out, sorted_pairs, shape, 0, GATE)),
            (_compute, (tiles, results, out, sorted_pairs, shape, 1, GATE)),
            (_fetch, (tiles, x, x_stride, weight, sorted_pairs, shape, TOP_K, GATE)),
        ],
        [4, 4],
        [COMPUTE_REGISTERS, FETCH_REGISTERS],
    )


@gluon.jit
def _fetch(tiles, x, x_stride, weight, sorted_pairs, shape, TOP_K: gl.constexpr, GATE: gl.constexpr):
    """The producer warps: load all tiles of this program, as far ahead as the pipeline has stages."""
    ws, xs, there, used = tiles
    order, table, pair_weights = sorted_pairs
    expert_rows, half, num_steps, num_tiles, blocks = shape
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    done = 0
    for item in range(gl.program_id(0), num_tiles * blocks, gl.num_programs(0)):
        tile, block = item // blocks, item % blocks
        expert = gl.load(table + tile)
        if expert >= 0:
            columns = expert * expert_rows + block * (SIZE if GATE > 0 else 2 * SIZE)
            if GATE > 0:
                end = gl.load(table + 2 * num_tiles + tile)
                index = tile * (2 * ROWS) + gl.arange(0, 2 * ROWS, gl.SliceLayout(1, GATHER))
                pair = gl.load(order + index, mask=index < end, other=0)
                k = gl.arange(0, WIDTH, gl.SliceLayout(0, GATHER))
                offset = (pair // TOP_K).to(gl.int64) * x_stride
                source = x + (gl.expand_dims(offset, 1) + gl.expand_dims(k, 0))
            for step in range(num_steps):
                stage = done % STAGES
                at = step * WIDTH
                bar = there.index(stage)
                mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
                mbarrier.expect(bar, 2 * (SIZE if GATE > 0 else SIZE + ROWS) * WIDTH * 2)
                halves = ws.index(stage)
                tma.async_copy_global_to_shared(weight, [columns, at], bar, halves.slice(0, SIZE))
                tma.async_copy_global_to_shared(weight, [columns + half, at], bar, halves.slice(SIZE, SIZE))
                if GATE > 0:
                    async_copy.async_copy_global_to_shared(xs.index(stage), source + at)
                    async_copy.commit_group()
                    if step >= LAG:
                        async_copy.wait_group(LAG)
                        _publish(there, done - LAG)
                else:
                    tma.async_copy_global_to_shared(x, [tile * (2 * ROWS), at], bar, xs.index(stage))
                done += 1
            if GATE > 0:
                # before the latency of the next tile's tables
                async_copy.wait_group(1)
                _publish(there, done - 2)
                async_copy.wait_group(0)
                _publish(there, done - 1)


@gluon.jit
def _publish(there, step):
    fence_async_shared()  # wgmma reads what cp.async has written
    gl.thread_barrier()
    mbarrier.arrive(there.index(step % STAGES), count=1)


@gluon.jit
def _compute(tiles, results, out, sorted_pairs, shape, HALF: gl.constexpr, GATE: gl.constexpr):
    """A consumer warpgroup: MMA and epilogue of one half of the pairs of each tile."""
    ws, xs, there, used = tiles
    order, table, pair_weights = sorted_pairs
    expert_rows, half, num_steps, num_tiles, blocks = shape
    KEPT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    done = 0
    for item in range(gl.program_id(0), num_tiles * blocks, gl.num_programs(0)):
        tile, block = item // blocks, item % blocks
        first = tile * (2 * ROWS) + HALF * ROWS
        end = gl.load(table + 2 * num_tiles + tile)
        if gl.load(table + tile) >= 0:
            if first < end:
                acc, done = multiply_tile(tiles, None, done, num_steps, HALF, 0)
                left, right = halves(acc, SIZE)
                even, odd = results.index(2 * HALF), results.index(2 * HALF + 1)
                if GATE > 0:
                    one, two = halves(_gated(left, right, out.dtype, GATE), PART)
                    _store(gl.convert_layout(one, KEPT), first, block * SIZE, even, out)
                    _store(gl.convert_layout(two, KEPT), first, block * SIZE + PART, odd, out)
                else:
                    index = first + gl.arange(0, ROWS, gl.SliceLayout(1, KEPT))
                    pair = gl.load(order + index, mask=index < end, other=0)
                    scale = gl.expand_dims(gl.load(pair_weights + pair), 1)
                    one, two = halves(left, PART)
                    three, four = halves(right, PART)
                    column = block * (2 * SIZE)
                    _store(gl.convert_layout(one, KEPT) * scale, first, column, even, out)
                    _store(gl.convert_layout(two, KEPT) * scale, first, column + PART, odd, out)
                    _store(gl.convert_layout(three, KEPT) * scale, first, column + 2 * PART, even, out)
                    _store(gl.convert_layout(four, KEPT) * scale, first, column + 3 * PART, odd, out)
            else:
                for _ in range(num_steps):
                    mbarrier.wait(there.index(done % STAGES), done // STAGES & 1)
                    mbarrier.arrive(used.index(done % STAGES), count=1)
                    done += 1
    tma.store_wait(0)


@gluon.jit
def _gated(gate, up, dtype: gl.constexpr, GATE: gl.constexpr):
    """Rounded as the output of a separate GEMM would be."""
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    slope = gate
    if GATE == 2:
        # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + gl.exp(-slope))).to(dtype).to(gl.float32) * up


@gluon.jit
def _store(value, row, column, result, out):
    tma.store_wait(1)  # the result before the previous one, of the same buffer, has been copied
    result.store(value.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column], result)
