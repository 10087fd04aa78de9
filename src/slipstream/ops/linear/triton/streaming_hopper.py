"""Skinny GEMM for 3 to 256 rows on Hopper: TMA loads the weight many stages ahead, and before x is ready.

The weight is the left operand of the MMA, so that padding of few rows wastes no work. The steps around the GEMM in a
decoder layer are fused: the division of the previous norm before it; bias, gated activation or residual, and the
weighting of the next norm after it (`../unnormalized.py`). Written in Gluon, which has no interpreter:
`tests/ops/test_kernels_compile.py` compiles it on any machine, `pytest -m cuda` runs it.
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

from slipstream.ops.linear.capability import SMALL_WEIGHT
from slipstream.ops.linear.triton.epilogue import GATES, counters
from slipstream.ops.linear.unnormalized import Unnormalized
from slipstream.ops.pdl import dependent, release_next, wait_for_previous

WIDTH = gl.constexpr(64)  # inputs per TMA copy: 128 bytes
FETCH_REGISTERS = gl.constexpr(24)
MEMORY = 195 << 10  # bytes of shared memory for the pipeline of one program; one program per multiprocessor
MULTIPROCESSORS = 132


class StreamTile(NamedTuple):
    splits: int  # split-k
    outputs: int = 64  # per program, gate and up rows together
    rows: int = 0  # per program; 0: all
    copies: int = 2  # TMA copies of the weight per pipeline stage


def streaming_gemm(
    x: torch.Tensor | Unnormalized,  # [rows, in]
    weight: torch.Tensor,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None,
    gate: str,
    tile: StreamTile | None = None,
) -> torch.Tensor:
    """The GEMM of x, or of the norm of an `Unnormalized` x."""
    rows = len(x) if isinstance(x, torch.Tensor) else len(x.total)
    num_out = len(weight) // 2 if gate else len(weight)
    out = torch.empty((rows, num_out), dtype=weight.dtype, device=weight.device)
    _launch(x, weight, bias, gate, out, tile or stream_tile(rows, len(weight), weight.shape[1], gate))
    return out


def streaming_gemm_add(
    x: torch.Tensor,  # [rows, in]
    weight: torch.Tensor,  # [out, in]
    residual: torch.Tensor,  # [rows, out]
    norm: torch.Tensor,  # [out]
    eps: float,
    tile: StreamTile | None = None,
) -> Unnormalized:
    """residual + the GEMM, with what the next GEMM needs to finish the norm of the sum."""
    tile = tile or stream_tile(len(x), len(weight), weight.shape[1], "")
    assert residual.is_contiguous() and residual.shape == (len(x), len(weight)), f"{residual.shape}"
    total, weighted = (torch.empty(residual.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    squares = torch.empty(len(x), triton.cdiv(len(weight), tile.outputs), dtype=torch.float32, device=x.device)
    made = Unnormalized(total, norm, eps, weighted, squares)
    _launch(x, weight, None, "", total, tile, residual, made)
    return made


def _launch(
    x: torch.Tensor | Unnormalized,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: str,
    out: torch.Tensor,
    tile: StreamTile,
    residual: torch.Tensor | None = None,
    made: Unnormalized | None = None,
) -> None:
    squares, eps = None, 0.0
    if isinstance(x, Unnormalized):
        assert x.weighted is not None and x.squares is not None
        x, squares, eps = x.weighted, x.squares, x.eps
    rows, num_in = x.shape
    outputs = tile.outputs
    padded = tile.rows or _padded(rows)
    blocks, row_blocks = triton.cdiv(len(weight), outputs), triton.cdiv(rows, padded)
    steps = triton.cdiv(num_in, WIDTH.value * tile.copies)
    split_steps = triton.cdiv(steps, tile.splits)
    partials = arrived = None
    if tile.splits > 1:
        shape = (tile.splits, blocks * row_blocks, outputs * padded)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = counters(weight)
        assert blocks * row_blocks <= len(arrived), f"{blocks} x {row_blocks} blocks, but {len(arrived)} counters"
    _streaming_kernel[(row_blocks, blocks, tile.splits)](
        _describe(x, padded),
        _describe(weight, outputs // 2 if gate else outputs),
        squares,
        eps,
        bias,
        residual,
        None if made is None else made.norm,
        out,
        None if made is None else made.weighted,
        None if made is None else made.squares,
        partials,
        arrived,
        rows,
        out.shape[1],
        num_in,
        steps,
        split_steps,
        PARTS=0 if squares is None else squares.shape[1],
        GATE=GATES[gate],
        SPLITS=tile.splits,
        OUTPUTS=outputs,
        ROWS=padded,
        COPIES=tile.copies,
        STAGES=stages_for(tile, padded),
        num_warps=outputs // 16,
        maxnreg=96 if padded <= 64 else 168,
        **dependent(x.device, rows),
    )


def stream_tile(rows: int, num_out: int, num_in: int, gate: str) -> StreamTile:
    """Enough programs to fill the GPU; measured with benchmarks/ops/layer.py. With few rows and outputs split-k makes a
    program's part so small that all its weights are in flight at once."""
    blocks = triton.cdiv(num_out, 64)
    is_small = num_out * num_in <= SMALL_WEIGHT
    if rows <= 32 or (rows <= 64 and is_small and not gate):
        max_splits = MULTIPROCESSORS // blocks
        splits = max(1, min(triton.cdiv(num_in, 1024), max_splits)) if blocks <= 64 else 1
        return StreamTile(splits, rows=min(32, _padded(rows)), copies=4 if splits == 1 and max_splits else 2)
    if rows <= 64 and not is_small:
        return StreamTile(max(1, min(triton.cdiv(num_in, 6144), MULTIPROCESSORS // blocks)))
    if gate:
        return StreamTile(1, 128, 32 if rows <= 64 else 64 if rows <= 128 else 128, 1)
    if blocks >= 64:
        return StreamTile(1, 64, 64) if rows <= 128 else StreamTile(1, 128, 64, 1)
    return StreamTile(1, 64, 64 if rows > 128 and num_in <= 2048 else 32)


def stages_for(tile: StreamTile, rows: int) -> int:
    return MEMORY // ((tile.outputs + rows) * WIDTH.value * tile.copies * 2)


def _padded(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def _describe(matrix: torch.Tensor, num_rows: int) -> Any:
    box = [num_rows, WIDTH.value]
    return TensorDescriptor.from_tensor(matrix, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16))


# grid: (blocks of rows, blocks of outputs, splits)
@gluon.jit(do_not_specialize=["num_rows"])
def _streaming_kernel(
    x,
    weight,
    squares,
    eps,
    bias,
    residual,
    norm,
    out,
    weighted,
    made,
    partials,
    arrived,
    num_rows,
    num_out,
    num_in,
    num_steps,
    split_steps,
    PARTS: gl.constexpr,
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    COPIES: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    release_next(DEPENDENT)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, WIDTH], x.dtype)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES * COPIES, OUTPUTS, WIDTH], SHARED)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * COPIES, ROWS, WIDTH], SHARED)
    there, used = _make_barriers(STAGES), _make_barriers(STAGES)
    fence_async_shared()
    begin = gl.program_id(2) * split_steps
    count = gl.minimum(split_steps, num_steps - begin)
    tiles = (ws, xs, there, used)
    given = (squares, eps, num_in, bias, residual, norm, num_rows, num_out)
    results = (out, weighted, made, partials, arrived)
    gl.warp_specialize(
        [
            (_compute, (tiles, given, results, count, PARTS, GATE, SPLITS, OUTPUTS, ROWS, COPIES, STAGES, DEPENDENT)),
            (_fetch, (tiles, x, weight, num_out, begin, count, GATE, OUTPUTS, ROWS, COPIES, STAGES, DEPENDENT)),
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
    tiles,
    x,
    weight,
    num_out,
    begin,
    count,
    GATE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    COPIES: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The producer warp: loads weights until the pipeline is full, then x when it is ready, then the rest of both."""
    ws, xs, there, used = tiles
    ready = gl.minimum(count, STAGES)
    for step in range(ready):
        _copy_weight(weight, ws, there, begin + step, step, num_out, GATE, OUTPUTS, ROWS, COPIES)
    wait_for_previous(DEPENDENT)
    for step in range(ready):
        _copy_x(x, xs, there, begin + step, step, ROWS, COPIES)
    for step in range(ready, count):
        stage = step % STAGES
        mbarrier.wait(used.index(stage), (step // STAGES & 1) ^ 1)
        _copy_weight(weight, ws, there, begin + step, stage, num_out, GATE, OUTPUTS, ROWS, COPIES)
        _copy_x(x, xs, there, begin + step, stage, ROWS, COPIES)


@gluon.jit
def _copy_weight(
    weight,
    ws,
    there,
    step,
    stage,
    num_out,
    GATE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    COPIES: gl.constexpr,
):
    """Starts the weight copies of one stage. The barrier of the stage counts the bytes of x too."""
    HALF: gl.constexpr = OUTPUTS // 2
    block = gl.program_id(1)
    bar = there.index(stage)
    mbarrier.expect(bar, COPIES * (OUTPUTS + ROWS) * WIDTH * 2)
    for part in gl.static_range(COPIES):
        k = (step * COPIES + part) * WIDTH
        tile = ws.index(stage * COPIES + part)
        if GATE:
            # gate rows, and below them the up rows of the same outputs
            tma.async_copy_global_to_shared(weight, [block * HALF, k], bar, tile.slice(0, HALF))
            tma.async_copy_global_to_shared(weight, [num_out + block * HALF, k], bar, tile.slice(HALF, HALF))
        else:
            tma.async_copy_global_to_shared(weight, [block * OUTPUTS, k], bar, tile)


@gluon.jit
def _copy_x(x, xs, there, step, stage, ROWS: gl.constexpr, COPIES: gl.constexpr):
    for part in gl.static_range(COPIES):
        origin = [gl.program_id(0) * ROWS, (step * COPIES + part) * WIDTH]
        tma.async_copy_global_to_shared(x, origin, there.index(stage), xs.index(stage * COPIES + part))


@gluon.jit
def _compute(
    tiles,
    given,
    results,
    count,
    PARTS: gl.constexpr,
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    COPIES: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The consumer warps, one per 16 outputs: MMA and epilogue."""
    ws, xs, there, used = tiles
    squares, eps, num_in, bias, residual, norm, num_rows, num_out = given
    out, weighted, made, partials, arrived = results
    WARPS: gl.constexpr = OUTPUTS // 16
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    SIZE: gl.constexpr = OUTPUTS // 2 if GATE else OUTPUTS
    # adjacent lanes hold adjacent outputs, as out is laid out
    BY_ROW: gl.constexpr = gl.BlockedLayout([2 if SIZE >= 64 else 1, 1], [32, 1], [1, WARPS], [0, 1])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, BY_ROW))
    own = gl.program_id(1) * SIZE + gl.arange(0, SIZE, gl.SliceLayout(1, BY_ROW))
    inside = own < num_out
    mask = gl.expand_dims(inside, 1) & gl.expand_dims(row < num_rows, 0)
    target = gl.expand_dims(row * num_out, 0) + gl.expand_dims(own, 1)
    # operands of the epilogue are loaded while x is
    wait_for_previous(DEPENDENT)
    if squares is not None:
        part = gl.expand_dims(gl.arange(0, triton.next_power_of_2(PARTS), gl.SliceLayout(1, BY_ROW)), 1)
        padded_row = gl.expand_dims(row, 0)
        parts = gl.load(squares + padded_row * PARTS + part, mask=(part < PARTS) & (padded_row < num_rows), other=0.0)
    if residual is not None:
        added = gl.load(residual + target, mask=mask, other=0.0)

    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    for step in range(count):
        stage = step % STAGES
        mbarrier.wait(there.index(stage), step // STAGES & 1)
        for copy in gl.static_range(COPIES):
            tile = stage * COPIES + copy
            acc = warpgroup_mma(ws.index(tile), xs.index(tile).permute((1, 0)), acc, is_async=True)
        # the MMAs of this step are in flight, those of the previous step are complete
        acc = warpgroup_mma_wait(COPIES, deps=(acc,))
        if (step > 0) & (step + STAGES <= count):  # the producer waits for this stage
            mbarrier.arrive(used.index((step - 1) % STAGES), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    gl.thread_barrier()  # all warps have read x: its shared memory is reused for the sums
    sums = xs._reinterpret(gl.float32, [OUTPUTS, ROWS], gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))
    is_last = True
    if SPLITS > 1:
        block = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        blocks = gl.num_programs(0) * gl.num_programs(1)
        lane = gl.expand_dims(gl.arange(0, OUTPUTS, gl.SliceLayout(1, SUMS)), 1)
        where = partials + lane + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, SUMS)) * OUTPUTS, 0)
        gl.store(where + (gl.program_id(2) * blocks + block).to(gl.int64) * (OUTPUTS * ROWS), acc)
        # all threads store their partial sums before one increments the counter
        gl.thread_barrier()
        is_last = gl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        gl.thread_barrier()
        if is_last:
            acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
            for split in gl.static_range(SPLITS):
                start = where + (split * blocks + block).to(gl.int64) * (OUTPUTS * ROWS)
                acc += gl.load(start, cache_modifier=".cg")
            sums.store(acc)
            gl.store(arrived + block, 0)
    else:
        sums.store(acc)

    if is_last:
        gl.thread_barrier()
        result = sums.slice(0, SIZE).load(BY_ROW)
        if squares is not None:
            scale = gl.expand_dims(gl.rsqrt(gl.sum(parts, 0) / num_in + eps), 0)
            result *= scale
        if bias is not None:
            result += gl.expand_dims(gl.load(bias + own, mask=inside, other=0.0).to(gl.float32), 1)
        if GATE:
            up = sums.slice(SIZE, SIZE).load(BY_ROW)
            if squares is not None:
                up *= scale
            if bias is not None:
                up += gl.expand_dims(gl.load(bias + num_out + own, mask=inside, other=0.0).to(gl.float32), 1)
            slope = result
            if GATE == 2:
                # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
                slope = 1.5957691216057308 * (result + 0.044715 * result * result * result)
            result = result / (1.0 + gl.exp(-slope)) * up
        if residual is not None:
            result += added.to(gl.float32)
        rounded = result.to(out.dtype.element_ty)
        gl.store(out + target, rounded, mask=mask)
        if norm is not None:
            value = rounded.to(gl.float32)
            factor = gl.expand_dims(gl.load(norm + own, mask=inside, other=0.0).to(gl.float32), 1)
            gl.store(weighted + target, (value * factor).to(out.dtype.element_ty), mask=mask)
            total = gl.sum(value * value, 0)
            gl.store(made + row * gl.num_programs(1) + gl.program_id(1), total, mask=row < num_rows)
