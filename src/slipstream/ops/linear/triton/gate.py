"""Gates and ups of very many rows on Hopper, with their activation.

The library would write them for another kernel to read: twice as many numbers as the network goes on with, at the limit
of the device's power. Each program takes tiles of 128 rows and 128 outputs in turn: one warp fetches, and two groups of
four compute 64 rows each. The second group keeps some steps behind the first, so that one ends its tile while the other
has the matrix units. Written in Gluon, as `hopper.py`.
"""

from __future__ import annotations

from functools import cache
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

from slipstream.ops.linear.triton.around import GATES

ROWS = gl.constexpr(64)  # of a group
SIZE = gl.constexpr(128)  # gates of a tile, and ups
WIDTH = gl.constexpr(64)  # inputs of a step: 128 bytes
STAGES = gl.constexpr(4)
GROUP = gl.constexpr(16)  # blocks of rows whose tiles are made together: what they read lies in the device's cache
LONG = 2048  # inputs from which it pays that one group is ahead
# A program has a multiprocessor to itself. Its registers, shared out evenly, are 168 a thread; the warp that fetches
# gives most of its own to those that compute.
EVEN_REGISTERS = 168
COMPUTE_REGISTERS = gl.constexpr(240)
FETCH_REGISTERS = gl.constexpr(24)


def gate_many(x: torch.Tensor, weight: torch.Tensor, gate: str) -> torch.Tensor:
    """x [rows, in] times gates and then ups [2 * out, in], through the activation."""
    (rows, num_in), num_out = x.shape, len(weight) // 2
    out = torch.empty(rows, num_out, dtype=x.dtype, device=x.device)
    row_blocks, blocks = triton.cdiv(rows, 2 * ROWS.value), triton.cdiv(num_out, SIZE.value)
    _gate_kernel[(min(_multiprocessors(x.device), row_blocks * blocks),)](
        _describe(x, [2 * ROWS.value, WIDTH.value]),
        _describe(weight, [SIZE.value, WIDTH.value]),
        _describe(out, [ROWS.value, SIZE.value]),
        num_out,
        triton.cdiv(num_in, WIDTH.value),
        row_blocks,
        blocks,
        GATE=GATES[gate],
        AHEAD=2 if num_in >= LONG else 0,
        num_warps=4,
        maxnreg=EVEN_REGISTERS,
    )
    return out


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _describe(matrix: torch.Tensor, box: list[int]) -> Any:
    return TensorDescriptor.from_tensor(matrix, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16))


# grid: (multiprocessors,) over (group of row blocks, block of outputs, row block)
@gluon.jit(do_not_specialize=["row_blocks"])
def _gate_kernel(x, weight, out, num_out, num_steps, row_blocks, blocks, GATE: gl.constexpr, AHEAD: gl.constexpr):
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * SIZE, WIDTH], x.dtype)
    RESULT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SIZE], x.dtype)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * SIZE, WIDTH], TILE)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * ROWS, WIDTH], TILE)
    results = gl.allocate_shared_memory(x.dtype, [2, ROWS, SIZE], RESULT)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ahead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(there.index(stage), count=1)
        mbarrier.init(used.index(stage), count=2)
    mbarrier.init(ahead, count=1)
    fence_async_shared()
    tiles = (ws, xs, there, used)
    gl.warp_specialize(
        [
            (_compute, (tiles, ahead, results.index(0), out, num_steps, row_blocks, blocks, 0, GATE, AHEAD)),
            (_compute, (tiles, ahead, results.index(1), out, num_steps, row_blocks, blocks, 1, GATE, AHEAD)),
            (_fetch, (tiles, x, weight, num_out, num_steps, row_blocks, blocks)),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, FETCH_REGISTERS],
    )


@gluon.jit
def _fetch(tiles, x, weight, num_out, num_steps, row_blocks, blocks):
    """One warp: all tiles of this program, as far ahead as there is room."""
    ws, xs, there, used = tiles
    done = 0
    for tile in range(gl.program_id(0), row_blocks * blocks, gl.num_programs(0)):
        row, block = _place(tile, row_blocks, blocks)
        for step in range(num_steps):
            stage = done % STAGES
            k = step * WIDTH
            bar = there.index(stage)
            mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * (SIZE + ROWS) * WIDTH * 2)
            tma.async_copy_global_to_shared(x, [row * (2 * ROWS), k], bar, xs.index(stage))
            # gates, and below them the ups they belong to
            halves = ws.index(stage)
            tma.async_copy_global_to_shared(weight, [block * SIZE, k], bar, halves.slice(0, SIZE))
            tma.async_copy_global_to_shared(weight, [num_out + block * SIZE, k], bar, halves.slice(SIZE, SIZE))
            done += 1


@gluon.jit
def _compute(
    tiles,
    ahead,
    result,
    out,
    num_steps,
    row_blocks,
    blocks,
    HALF: gl.constexpr,
    GATE: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Four warps: one half of each tile of this program."""
    ws, xs, there, used = tiles
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * SIZE, 16])
    KEPT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    if AHEAD > 0 and HALF == 1:
        mbarrier.wait(ahead, 0)
    done = 0
    for tile in range(gl.program_id(0), row_blocks * blocks, gl.num_programs(0)):
        row, block = _place(tile, row_blocks, blocks)
        acc = gl.zeros([ROWS, 2 * SIZE], gl.float32, SUMS)
        for step in range(num_steps):
            stage = done % STAGES
            mbarrier.wait(there.index(stage), done // STAGES & 1)
            part = xs.index(stage).slice(HALF * ROWS, ROWS)
            acc = warpgroup_mma(part, ws.index(stage).permute((1, 0)), acc, is_async=True)
            # this step's are under way, those of the one before are done
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if step > 0:
                mbarrier.arrive(used.index((done - 1) % STAGES), count=1)
            if AHEAD > 0 and HALF == 0:  # noqa: SIM102
                if done == AHEAD:
                    mbarrier.arrive(ahead, count=1)
            done += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(used.index((done - 1) % STAGES), count=1)

        gate, up = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, SIZE]), (0, 2, 1)))
        slope = gate
        if GATE == 2:
            # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
            slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = (gate / (1.0 + gl.exp(-slope)) * up).to(out.dtype)
        tma.store_wait(0)  # the last result has left
        result.store(gl.convert_layout(value, KEPT))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [(row * 2 + HALF) * ROWS, block * SIZE], result)
    tma.store_wait(0)


@gluon.jit
def _place(tile, row_blocks, blocks):
    """Row block and block of outputs: some row blocks at a time, which take turns."""
    first = tile // (GROUP * blocks) * GROUP
    size = gl.minimum(row_blocks - first, GROUP)
    inside = tile % (GROUP * blocks)
    return first + inside % size, inside // size
