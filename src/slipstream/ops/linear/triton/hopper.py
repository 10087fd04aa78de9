"""Products of 3 to 64 rows on Hopper: the weight comes by tensor copies, far ahead, and before the kernel that makes x
is done.

64 outputs a program, for all rows: the weight is the left side of the product, so that few rows waste nothing. Written
in Gluon, which has no interpreter: `tests/ops/test_kernels_compile.py` compiles it anywhere, `-m cuda` runs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from slipstream.ops.dependent import dependent, release_next, wait_for_previous
from slipstream.ops.linear.triton.around import GATES, counters

OUTPUTS = gl.constexpr(64)  # a program's, gates and ups together
HALF = gl.constexpr(32)
WIDTH = gl.constexpr(64)  # inputs that one tensor copy brings: 128 bytes
COPIES = gl.constexpr(2)  # of the weight, in one stage
REGISTERS = 96
FETCH_REGISTERS = gl.constexpr(24)


class StreamTile(NamedTuple):
    splits: int  # programs that share outputs, each with some of the inputs
    stages: int


def stream_rows(
    x: torch.Tensor,  # [rows, in], up to 64 rows
    weight: torch.Tensor,  # [out, in], or gates and then ups: [2 * out, in]
    bias: torch.Tensor | None,
    gate: str,
    tile: StreamTile | None = None,
) -> torch.Tensor:
    rows, num_in = x.shape
    num_out = len(weight) // 2 if gate else len(weight)
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(len(weight), OUTPUTS.value)
    padded = max(16, triton.next_power_of_2(rows))
    steps = triton.cdiv(num_in, WIDTH.value * COPIES.value)
    tile = tile or stream_tile(blocks, steps, padded)
    partials = arrived = None
    if tile.splits > 1:
        partials = torch.empty((tile.splits, blocks, OUTPUTS.value, padded), dtype=torch.float32, device=x.device)
        arrived = counters(weight)
        assert blocks <= len(arrived), f"{blocks} blocks of outputs, and counters for {len(arrived)}"
    _stream_kernel[(blocks, tile.splits)](
        _describe(x, padded),
        _describe(weight, OUTPUTS.value // 2 if gate else OUTPUTS.value),
        bias,
        out,
        partials,
        arrived,
        rows,
        num_out,
        steps,
        triton.cdiv(steps, tile.splits),
        GATE=GATES[gate],
        SPLITS=tile.splits,
        ROWS=padded,
        STAGES=tile.stages,
        num_warps=4,
        maxnreg=REGISTERS,
        **dependent(x.device, rows),
    )
    return out


def stream_tile(blocks: int, steps: int, rows: int) -> StreamTile:
    """One program a multiprocessor, with as many stages as fit. Where outputs are few, so many programs share them that
    all of each one's weight is on its way at once."""
    splits = triton.cdiv(steps, 8) if blocks < 64 else 1
    stage = (OUTPUTS.value + rows) * WIDTH.value * COPIES.value * 2  # bytes
    return StreamTile(max(1, min(splits, 132 // blocks)), (195 << 10) // stage)


def _describe(matrix: torch.Tensor, num_rows: int) -> Any:
    box = [num_rows, WIDTH.value]
    return TensorDescriptor.from_tensor(matrix, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16))


# grid: (blocks of outputs, splits)
@gluon.jit(do_not_specialize=["num_rows"])
def _stream_kernel(
    x,
    weight,
    bias,
    out,
    partials,
    arrived,
    num_rows,
    num_out,
    num_steps,
    split_steps,
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    release_next(DEPENDENT)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, WIDTH], x.dtype)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES * COPIES, OUTPUTS, WIDTH], SHARED)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * COPIES, ROWS, WIDTH], SHARED)
    there, used = _make_barriers(STAGES), _make_barriers(STAGES)
    fence_async_shared()
    begin = gl.program_id(1) * split_steps
    count = gl.minimum(split_steps, num_steps - begin)
    results = (bias, out, partials, arrived, num_rows, num_out)
    tiles = (ws, xs, there, used)
    gl.warp_specialize(
        [
            (_compute, (results, tiles, count, GATE, SPLITS, ROWS, STAGES)),
            (_fetch, (x, weight, tiles, num_out, begin, count, GATE, ROWS, STAGES, DEPENDENT)),
        ],
        [1],
        [FETCH_REGISTERS],
    )


@gluon.jit
def _make_barriers(STAGES: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    return barriers


@gluon.jit
def _fetch(
    x,
    weight,
    tiles,
    num_out,
    begin,
    count,
    GATE: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One warp: as much of the weight as there is room for, then x once it is made, then the rest of both."""
    ws, xs, there, used = tiles
    block = gl.program_id(0)
    ready = gl.minimum(count, STAGES)
    for step in range(ready):
        _copy_weight(weight, ws, there, begin + step, step, block, num_out, GATE, ROWS)
    wait_for_previous(DEPENDENT)
    for step in range(ready):
        _copy_x(x, xs, there, begin + step, step)
    for step in range(ready, count):
        stage = step % STAGES
        mbarrier.wait(used.index(stage), (step // STAGES & 1) ^ 1)
        _copy_weight(weight, ws, there, begin + step, stage, block, num_out, GATE, ROWS)
        _copy_x(x, xs, there, begin + step, stage)


@gluon.jit
def _copy_weight(weight, ws, there, step, stage, block, num_out, GATE: gl.constexpr, ROWS: gl.constexpr):
    """Start copying what a step reads of the weight. Its barrier waits for x too."""
    bar = there.index(stage)
    mbarrier.expect(bar, COPIES * (OUTPUTS + ROWS) * WIDTH * 2)
    for part in gl.static_range(COPIES):
        k = (step * COPIES + part) * WIDTH
        tile = ws.index(stage * COPIES + part)
        if GATE:
            # gates, and below them the ups they belong to
            tma.async_copy_global_to_shared(weight, [block * HALF, k], bar, tile.slice(0, HALF))
            tma.async_copy_global_to_shared(weight, [num_out + block * HALF, k], bar, tile.slice(HALF, HALF))
        else:
            tma.async_copy_global_to_shared(weight, [block * OUTPUTS, k], bar, tile)


@gluon.jit
def _copy_x(x, xs, there, step, stage):
    for part in gl.static_range(COPIES):
        k = (step * COPIES + part) * WIDTH
        tma.async_copy_global_to_shared(x, [0, k], there.index(stage), xs.index(stage * COPIES + part))


@gluon.jit
def _compute(
    results,
    tiles,
    count,
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps: the sums, and what follows them. They touch nothing of others before x is there."""
    bias, out, partials, arrived, num_rows, num_out = results
    ws, xs, there, used = tiles
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    block = gl.program_id(0)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    for step in range(count):
        stage = step % STAGES
        mbarrier.wait(there.index(stage), step // STAGES & 1)
        for part in gl.static_range(COPIES):
            place = stage * COPIES + part
            acc = warpgroup_mma(ws.index(place), xs.index(place).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(used.index(stage), count=1)
    if SPLITS > 1:
        split = gl.program_id(1)
        blocks = gl.num_programs(0)
        lane = gl.arange(0, OUTPUTS, gl.SliceLayout(1, SUMS))
        row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
        tile = gl.expand_dims(row * OUTPUTS, 0) + gl.expand_dims(lane, 1)
        gl.store(partials + (split * blocks + block).to(gl.int64) * (OUTPUTS * ROWS) + tile, acc)
        # every thread's stores are made before one of them tells of it
        gl.thread_barrier()
        before = gl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu")
        gl.thread_barrier()
        if before == SPLITS - 1:
            acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
            for other in gl.static_range(SPLITS):
                start = partials + (other * blocks + block).to(gl.int64) * (OUTPUTS * ROWS)
                acc += gl.load(start + tile, cache_modifier=".cg")
            _finish(acc, bias, out, block, num_rows, num_out, GATE, ROWS)
            gl.store(arrived + block, 0)
    else:
        _finish(acc, bias, out, block, num_rows, num_out, GATE, ROWS)


@gluon.jit
def _finish(acc, bias, out, block, num_rows, num_out, GATE: gl.constexpr, ROWS: gl.constexpr):
    """Bias, activation, and the store."""
    SIZE: gl.constexpr = OUTPUTS // 2 if GATE else OUTPUTS
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])  # lanes beside each other, as out has them
    sums = gl.allocate_shared_memory(gl.float32, [OUTPUTS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    sums.store(acc)
    own = block * SIZE + gl.arange(0, SIZE, gl.SliceLayout(1, LINES))
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LINES)), 0)
    inside = own < num_out
    result = sums.slice(0, SIZE).load(LINES)
    if bias is not None:
        result += gl.expand_dims(gl.load(bias + own, mask=inside, other=0.0).to(gl.float32), 1)
    if GATE:
        up = sums.slice(SIZE, SIZE).load(LINES)
        if bias is not None:
            up += gl.expand_dims(gl.load(bias + num_out + own, mask=inside, other=0.0).to(gl.float32), 1)
        slope = result
        if GATE == 2:
            # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
            slope = 1.5957691216057308 * (result + 0.044715 * result * result * result)
        result = result / (1.0 + gl.exp(-slope)) * up
    mask = gl.expand_dims(inside, 1) & (row < num_rows)
    gl.store(out + row * num_out + gl.expand_dims(own, 1), result.to(out.dtype.element_ty), mask=mask)
