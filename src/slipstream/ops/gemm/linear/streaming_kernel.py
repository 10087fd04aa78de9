"""The kernel of `streaming_hopper.py`, in Gluon: one warp loads weights and x by TMA, the others multiply.

A program computes GROUPS blocks, 1 or 3, of OUTPUTS outputs for the same rows. Each block has consumer warps of its
own (a warpgroup per 64 outputs), and all blocks read the same tiles of x: a program with three blocks loads a third of
the x bytes per weight byte. The rows of a program are ROWS and, if not 0, MORE_ROWS: shapes in Gluon are powers of
two, and 80 rows as 64 + 16 load no padding. OUTPUTS need not be a power of two either: 48 are padded for the MMA, but
only 48 are loaded. With FP8 weights x is FP8 too, or a row of bfloat16 that the program
quantises, and the epilogue multiplies by the scales of both. With adapters the blocks after
those of the weight have rows of their matrices A.
Compiled by `tests/ops/test_kernels_compile.py`, run by `pytest -m cuda`.
"""

from __future__ import annotations

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

from slipstream.ops.gemm.linear.epilogue import load_operands, store_results, target_of
from slipstream.ops.platform.pdl import make_barriers, release_next, wait_for_previous

BYTES = gl.constexpr(128)  # of a weight row per TMA copy
FETCH_REGISTERS = gl.constexpr(24)
GROUP_REGISTERS = gl.constexpr(152)  # per consumer thread of a program with three blocks
LARGE_GROUP_REGISTERS = gl.constexpr(160)  # if it has the sums of 256 rows; the first group then has fewer


# grid: (blocks of rows, groups of blocks of outputs, splits)
@gluon.jit(do_not_specialize=["num_rows", "weight_blocks", "slot_units"])
def streaming_kernel(
    x,  # descriptor, boxes of ROWS x WIDTH
    more_x,  # the same matrix, boxes of MORE_ROWS x WIDTH; None if there are no more rows
    weight,
    adapters,  # descriptor [slots, rows of A, in], boxes of 1 x 16 x WIDTH; None without adapters
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
    scale,  # of weight rows [out] and of rows of x, float32; None unless both are FP8
    x_scale,
    row_x,  # instead of x: a row of bfloat16; else None
    num_rows,
    num_out,
    num_in,
    num_steps,
    split_steps,
    weight_blocks,  # with adapters: blocks of the weight, and rows of A per slot / 16
    slot_units,
    PARTS: gl.constexpr,
    CHUNKS: gl.constexpr,  # of `row_x`; else 0
    OWN_CHUNKS: gl.constexpr,  # of a split
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    MORE_ROWS: gl.constexpr,
    COPIES: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    release_next(DEPENDENT)
    WIDTH: gl.constexpr = width_of(weight.dtype)
    PADDED: gl.constexpr = triton.next_power_of_2(OUTPUTS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PADDED, WIDTH], weight.dtype)
    TILES: gl.constexpr = STAGES * COPIES
    first = gl.allocate_shared_memory(weight.dtype, [TILES, PADDED, WIDTH], SHARED)
    second = first
    third = first
    if GROUPS == 3:
        second = gl.allocate_shared_memory(weight.dtype, [TILES, PADDED, WIDTH], SHARED)
        third = gl.allocate_shared_memory(weight.dtype, [TILES, PADDED, WIDTH], SHARED)
    X_TILES: gl.constexpr = TILES if row_x is None else OWN_CHUNKS * CHUNK
    xs = gl.allocate_shared_memory(weight.dtype, [X_TILES, ROWS, WIDTH], SHARED)
    more_xs = xs
    if MORE_ROWS:
        more_xs = gl.allocate_shared_memory(weight.dtype, [TILES, MORE_ROWS, WIDTH], SHARED)
    there, used = make_barriers(STAGES, 1), make_barriers(STAGES, GROUPS)
    fence_async_shared()
    begin = gl.program_id(2) * split_steps
    count = gl.minimum(split_steps, num_steps - begin)
    inputs = (xs, more_xs, there, used)
    given = (squares, eps, num_in, bias, residual, norm, num_rows, num_out, scale, x_scale)
    results = (out, weighted, made, partials, arrived)
    TILE: gl.constexpr = (OUTPUTS, GROUPS, ROWS, MORE_ROWS, COPIES, STAGES)
    row = (row_x, begin)
    COUNTS: gl.constexpr = (PARTS, CHUNKS, OWN_CHUNKS)
    sources = (weight, adapters, weight_blocks, slot_units)
    fetched = ((first, second, third), inputs, x, more_x, sources, num_out, begin, count, GATE, TILE, DEPENDENT)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    _compute,
                    (first, 0, inputs, row, given, results, count, COUNTS, GATE, SPLITS, TILE, DEPENDENT),
                ),
                (_fetch, fetched),
            ],
            [1],
            [FETCH_REGISTERS],
        )
    else:
        REGISTERS: gl.constexpr = LARGE_GROUP_REGISTERS if ROWS + MORE_ROWS > 192 else GROUP_REGISTERS
        gl.warp_specialize(
            [
                (
                    _compute,
                    (first, 0, inputs, row, given, results, count, COUNTS, GATE, SPLITS, TILE, DEPENDENT),
                ),
                (
                    _compute,
                    (second, 1, inputs, row, given, results, count, COUNTS, GATE, SPLITS, TILE, DEPENDENT),
                ),
                (
                    _compute,
                    (third, 2, inputs, row, given, results, count, COUNTS, GATE, SPLITS, TILE, DEPENDENT),
                ),
                (_fetch, fetched),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FETCH_REGISTERS],
        )


@gluon.constexpr_function
def width_of(dtype):
    """Inputs per TMA copy."""
    return BYTES.value * 8 // dtype.primitive_bitwidth


@gluon.jit
def _fetch(
    weights,
    inputs,
    x,
    more_x,
    sources,  # of weight rows
    num_out,
    begin,
    count,
    GATE: gl.constexpr,
    TILE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The producer warp: loads weights until the pipeline is full, then x when it is ready, then the rest of both."""
    STAGES: gl.constexpr = TILE[5]
    xs, more_xs, there, used = inputs
    ready = gl.minimum(count, STAGES)
    for step in range(ready):
        _copy_weight(sources, weights, there, begin + step, step, num_out, GATE, TILE, x is not None)
    wait_for_previous(DEPENDENT)
    if x is not None:
        for step in range(ready):
            _copy_x(x, more_x, xs, more_xs, there, begin + step, step, TILE)
    for step in range(ready, count):
        stage = step % STAGES
        mbarrier.wait(used.index(stage), (step // STAGES & 1) ^ 1)
        _copy_weight(sources, weights, there, begin + step, stage, num_out, GATE, TILE, x is not None)
        if x is not None:
            _copy_x(x, more_x, xs, more_xs, there, begin + step, stage, TILE)


@gluon.jit
def _copy_weight(
    sources, weights, there, step, stage, num_out, GATE: gl.constexpr, TILE: gl.constexpr, HAS_X: gl.constexpr
):
    """Starts the weight copies of one stage. The barrier of the stage counts the bytes of x too, if TMA loads it."""
    OUTPUTS: gl.constexpr = TILE[0]
    GROUPS: gl.constexpr = TILE[1]
    ALL_ROWS: gl.constexpr = TILE[2] + TILE[3] if HAS_X else 0
    COPIES: gl.constexpr = TILE[4]
    HALF: gl.constexpr = triton.next_power_of_2(OUTPUTS) // 2
    weight, adapters, weight_blocks, slot_units = sources
    WIDTH: gl.constexpr = width_of(weight.dtype)
    bar = there.index(stage)
    mbarrier.expect(bar, COPIES * (GROUPS * OUTPUTS + ALL_ROWS) * BYTES)
    for part in gl.static_range(COPIES):
        k = (step * COPIES + part) * WIDTH
        for group in gl.static_range(GROUPS):
            block = gl.program_id(1) * GROUPS + group
            target = weights[group].index(stage * COPIES + part)
            if GATE:
                # gate rows, and below them the up rows of the same outputs
                tma.async_copy_global_to_shared(weight, [block * HALF, k], bar, target.slice(0, HALF))
                tma.async_copy_global_to_shared(weight, [num_out + block * HALF, k], bar, target.slice(HALF, HALF))
            elif OUTPUTS % 64 != 0:
                for unit in gl.static_range(0, OUTPUTS, 16):
                    tma.async_copy_global_to_shared(weight, [block * OUTPUTS + unit, k], bar, target.slice(unit, 16))
            elif adapters is None:
                tma.async_copy_global_to_shared(weight, [block * OUTPUTS, k], bar, target)
            else:
                if block < weight_blocks:
                    tma.async_copy_global_to_shared(weight, [block * OUTPUTS, k], bar, target)
                else:
                    UNITS: gl.constexpr = OUTPUTS // 16
                    BOX: gl.constexpr = gl.NVMMASharedLayout(BYTES, 16, 3)
                    tiles = weights[group]._reinterpret(weight.dtype, [TILE[5] * COPIES * UNITS, 1, 16, WIDTH], BOX)
                    for number in gl.static_range(UNITS):
                        unit = (block - weight_blocks) * UNITS + number  # after the last slot TMA writes zeros
                        own = tiles.index((stage * COPIES + part) * UNITS + number)
                        source = [unit // slot_units, unit % slot_units * 16, k]
                        tma.async_copy_global_to_shared(adapters, source, bar, own)


@gluon.jit
def _copy_x(x, more_x, xs, more_xs, there, step, stage, TILE: gl.constexpr):
    ROWS: gl.constexpr = TILE[2]
    MORE_ROWS: gl.constexpr = TILE[3]
    COPIES: gl.constexpr = TILE[4]
    WIDTH: gl.constexpr = width_of(x.dtype)
    row = gl.program_id(0) * (ROWS + MORE_ROWS)
    for part in gl.static_range(COPIES):
        k = (step * COPIES + part) * WIDTH
        tma.async_copy_global_to_shared(x, [row, k], there.index(stage), xs.index(stage * COPIES + part))
        if MORE_ROWS:
            target = more_xs.index(stage * COPIES + part)
            tma.async_copy_global_to_shared(more_x, [row + ROWS, k], there.index(stage), target)


@gluon.jit
def _compute(
    ws,
    GROUP: gl.constexpr,
    inputs,
    row_of_x,
    given,
    results,
    count,
    COUNTS: gl.constexpr,  # PARTS, CHUNKS, OWN_CHUNKS
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    TILE: gl.constexpr,  # OUTPUTS, GROUPS, ROWS, MORE_ROWS, COPIES, STAGES
    DEPENDENT: gl.constexpr,
):
    """The consumer warps of one block, one per 16 outputs: MMA and epilogue."""
    OUTPUTS: gl.constexpr = TILE[0]
    GROUPS: gl.constexpr = TILE[1]
    ROWS: gl.constexpr = TILE[2]
    MORE_ROWS: gl.constexpr = TILE[3]
    COPIES: gl.constexpr = TILE[4]
    PARTS: gl.constexpr = COUNTS[0]
    STAGES: gl.constexpr = TILE[5]
    xs, more_xs, there, used = inputs
    partials, arrived = results[3], results[4]
    PADDED: gl.constexpr = triton.next_power_of_2(OUTPUTS)
    WARPS: gl.constexpr = PADDED // 16
    DEPTH: gl.constexpr = width_of(ws.dtype) // 4  # inputs of an MMA instruction
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, DEPTH])
    MORE_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, MORE_ROWS or ROWS, DEPTH])
    block = gl.program_id(1) * GROUPS + GROUP
    row = gl.program_id(0) * (ROWS + MORE_ROWS)
    wait_for_previous(DEPENDENT)
    row_x, begin = row_of_x
    if row_x is not None:
        x_scale = quantize_row(row_x, xs, begin * COPIES, given[2], COUNTS[1], COUNTS[2], ROWS, WARPS)
        fence_async_shared()
        gl.thread_barrier()
        squares, eps, num_in, bias, residual, norm, num_rows, num_out, scale, no_scale = given
        given = (squares, eps, num_in, bias, residual, norm, num_rows, num_out, scale, x_scale)
    if GROUPS == 1:  # loaded while x is; three blocks have no registers for them
        operands = load_operands(given, row, block, PARTS, GATE, OUTPUTS, ROWS, row_x is not None)
        if MORE_ROWS:
            more_operands = load_operands(given, row + ROWS, block, PARTS, GATE, OUTPUTS, MORE_ROWS)
    acc = gl.zeros([PADDED, ROWS], gl.float32, SUMS)
    if MORE_ROWS:
        more_acc = gl.zeros([PADDED, MORE_ROWS], gl.float32, MORE_SUMS)
    for step in range(count):
        stage = step % STAGES
        mbarrier.wait(there.index(stage), step // STAGES & 1)
        x_stage = stage if row_x is None else step  # all tiles of a row that was quantised are there
        for copy in gl.static_range(COPIES):
            index = stage * COPIES + copy
            x_tile = xs.index(x_stage * COPIES + copy)
            acc = warpgroup_mma(ws.index(index), x_tile.permute((1, 0)), acc, is_async=True)
            if MORE_ROWS:
                more_acc = warpgroup_mma(ws.index(index), more_xs.index(index).permute((1, 0)), more_acc, is_async=True)
        # the MMAs of this step are in flight, those of the previous step are complete
        if MORE_ROWS:
            acc, more_acc = warpgroup_mma_wait(2 * COPIES, deps=(acc, more_acc))
        else:
            acc = warpgroup_mma_wait(COPIES, deps=(acc,))
        if (step > 0) & (step + STAGES <= count):  # the producer waits for this stage
            mbarrier.arrive(used.index((step - 1) % STAGES), count=1)
    if MORE_ROWS:
        acc, more_acc = warpgroup_mma_wait(0, deps=(acc, more_acc))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))

    gl.thread_barrier()  # all warps of the block have read: shared memory is reused for the sums
    # x is shared by all blocks of the program, the weights are the block's own
    free = xs if GROUPS == 1 else ws
    if SPLITS > 1 and arrived is None:
        # the next kernel adds the partial sums: `out` is [SPLITS, rows, outputs] in float32, and scales alone are fused
        stored = (results[0] + gl.program_id(2).to(gl.int64) * (given[6] * given[7]), None, None, None, None)
        _finish(acc, operands, free, given, stored, row, block, GATE, OUTPUTS, GROUPS, ROWS)
        if MORE_ROWS:
            gl.thread_barrier()  # the sums of the first rows have been read
            _finish(more_acc, more_operands, free, given, stored, row + ROWS, block, GATE, OUTPUTS, GROUPS, MORE_ROWS)
    elif SPLITS > 1:
        ALL: gl.constexpr = OUTPUTS * (ROWS + MORE_ROWS)
        number = block * gl.num_programs(0) + gl.program_id(0)
        numbers = gl.num_programs(0) * gl.num_programs(1) * GROUPS
        where = partials + _offsets(OUTPUTS, ROWS, SUMS)
        start = (gl.program_id(2) * numbers + number).to(gl.int64) * ALL
        gl.store(where + start, acc)
        if MORE_ROWS:
            more_where = partials + OUTPUTS * ROWS + _offsets(OUTPUTS, MORE_ROWS, MORE_SUMS)
            gl.store(more_where + start, more_acc)
        # all threads store their partial sums before one increments the counter
        gl.thread_barrier()
        is_last = gl.atomic_add(arrived + number, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        gl.thread_barrier()
        if is_last:
            acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
            for split in gl.static_range(SPLITS):
                acc += gl.load(where + (split * numbers + number).to(gl.int64) * ALL, cache_modifier=".cg")
            gl.store(arrived + number, 0)
            if GROUPS > 1:
                operands = load_operands(given, row, block, PARTS, GATE, OUTPUTS, ROWS, row_x is not None)
            _finish(acc, operands, free, given, results, row, block, GATE, OUTPUTS, GROUPS, ROWS)
            if MORE_ROWS:
                more_acc = gl.zeros([OUTPUTS, MORE_ROWS], gl.float32, MORE_SUMS)
                for split in gl.static_range(SPLITS):
                    start = (split * numbers + number).to(gl.int64) * ALL
                    more_acc += gl.load(more_where + start, cache_modifier=".cg")
                if GROUPS > 1:
                    more_operands = load_operands(given, row + ROWS, block, PARTS, GATE, OUTPUTS, MORE_ROWS)
                gl.thread_barrier()  # the sums of the first rows have been read
                _finish(
                    more_acc, more_operands, free, given, results, row + ROWS, block, GATE, OUTPUTS, GROUPS, MORE_ROWS
                )
    else:
        if GROUPS > 1:
            operands = load_operands(given, row, block, PARTS, GATE, OUTPUTS, ROWS, row_x is not None)
        _finish(acc, operands, free, given, results, row, block, GATE, OUTPUTS, GROUPS, ROWS)
        if MORE_ROWS:
            if GROUPS > 1:
                more_operands = load_operands(given, row + ROWS, block, PARTS, GATE, OUTPUTS, MORE_ROWS)
            gl.thread_barrier()  # the sums of the first rows have been read
            _finish(more_acc, more_operands, free, given, results, row + ROWS, block, GATE, OUTPUTS, GROUPS, MORE_ROWS)


@gluon.jit
def _offsets(OUTPUTS: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of partial sums, adjacent outputs side by side."""
    output = gl.expand_dims(gl.arange(0, OUTPUTS, gl.SliceLayout(1, LAYOUT)), 1)
    return output + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)) * OUTPUTS, 0)


@gluon.jit
def _finish(
    acc,
    operands,
    free,
    given,
    results,
    first_row,
    block,
    GATE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """The epilogue of ROWS rows of a block, through the shared memory `free`: adjacent lanes store adjacent outputs."""
    row, own, target, mask = target_of(given, first_row, block, GATE, OUTPUTS, ROWS)
    BY_ROW: gl.constexpr = mask.type.layout
    SIZE: gl.constexpr = own.shape[0]
    sums = free._reinterpret(gl.float32, [2 * SIZE if GATE else SIZE, ROWS], gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))
    sums.store(acc)
    gl.thread_barrier()
    result = sums.slice(0, SIZE).load(BY_ROW)
    up = result  # unused without a gate
    if GATE:
        up = sums.slice(SIZE, SIZE).load(BY_ROW)
    store_results(result, up, operands, given, results, first_row, block, GATE, OUTPUTS, GROUPS, ROWS)


# The FP8 input of the streaming kernel, if it is a single row of bfloat16: a program quantises it at its start.
#
# Meanwhile the producer warp loads weights. The scale is that of the whole row, its largest absolute value / 448, as in
# `ops/gemm/quantized/gemm.py`; a program that has a part of the inputs reads the whole row too.

MAX_FP8 = gl.constexpr(448.0)
CHUNK = gl.constexpr(16)  # tiles of 128 inputs per load


@gluon.jit
def quantize_row(
    x, tiles, first, num_in, ALL: gl.constexpr, OWN: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr
):
    """Writes the tiles from `first` on as FP8 to the first rows of `tiles` [OWN * CHUNK, ROWS, 128], and returns the
    scale. Other rows are not written: they are columns of the MMA that nothing reads. ALL: chunks of the row."""
    BY_TILE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    tile = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, BY_TILE)), 1)
    offset = tile * 128 + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, BY_TILE)), 0)
    largest = gl.zeros([CHUNK, 128], gl.float32, BY_TILE)
    for chunk in gl.static_range(ALL):
        at = chunk * (CHUNK * 128) + offset
        largest = gl.maximum(largest, gl.abs(gl.load(x + at, mask=at < num_in, other=0.0).to(gl.float32)))
    scale = gl.maximum(gl.max(gl.max(largest, 1), 0) / MAX_FP8, 1e-12)
    # without the swizzle of 128 bytes, which leaves the first of eight rows as it is
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = tiles._reinterpret(gl.float8e4nv, [OWN, CHUNK, ROWS * 128], PLAIN)
    for chunk in gl.static_range(OWN):
        at = (first + chunk * CHUNK) * 128 + offset
        value = gl.load(x + at, mask=at < num_in, other=0.0).to(gl.float32) * (1 / scale)
        rows.index(chunk).slice(0, 128, 1).store(value.to(gl.float8e4nv))
    return scale
