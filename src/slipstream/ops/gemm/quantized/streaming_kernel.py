"""The kernel of `streaming.py`, in Gluon: one warp loads FP8 or 4-bit weights and x by TMA, the others multiply.

A program computes GROUPS blocks, 1 or 3, of OUTPUTS outputs; each block has consumer warps of its own, and all blocks
read the same tiles of x. A step loads WARPS slices of 64 bytes of each weight row. A consumer warp multiplies
one slice for 64 outputs: a fragment of x serves many weights, and 16 adjacent bytes of a thread are 16 adjacent inputs,
so that a load of 16 bytes has no bank conflicts in rows of 64 bytes.
Weights become bfloat16 in registers. The sums of the slices are added in shared memory at the end. The steps around the
GEMM are fused as in `ops/gemm/linear/streaming_hopper.py`.

4 bits q are the bfloat16 128 + q, by two instructions for two numbers. What this adds to a sum, and the zero, is the
sum of x over the group times (128 + zero): an MMA with a matrix of ones computes these sums, 16 equal rows of them.
Compiled by `tests/ops/test_kernels_compile.py`, run by `pytest -m cuda`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from slipstream.ops.gemm.linear.epilogue import load_operands
from slipstream.ops.gemm.linear.streaming_kernel import FETCH_REGISTERS, GROUP_REGISTERS
from slipstream.ops.gemm.quantized.expand import BFLOAT16_OF_FP8
from slipstream.ops.gemm.quantized.warp_sums import finish
from slipstream.ops.platform.pdl import make_barriers, release_next, wait_for_previous

SLICE = gl.constexpr(64)  # bytes of a weight row that a warp multiplies in a step


# grid: (blocks of rows, blocks of outputs, splits)
@gluon.jit(do_not_specialize=["num_rows", "num_steps", "split_steps", "num_words"])
def streaming_kernel(
    x,  # descriptor [slices, rows, 64], boxes of WARPS x ROWS x 64; 4 bits: the inputs of low bits
    high_x,  # 4 bits: the inputs of high bits; else None
    weight,  # descriptor [slices, gate and up, out, 64 bytes]
    scale,  # FP8: [out] float32; 4 bits: the words [groups, out] of `matrix.py`, a group for each slice
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
    num_words,  # groups; 0 for FP8
    words_stride,
    PARTS: gl.constexpr,
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    release_next(DEPENDENT)
    IS_4_BIT: gl.constexpr = high_x is not None
    BYTES: gl.constexpr = gl.NVMMASharedLayout(64, 8, 3)
    INPUTS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    first = gl.allocate_shared_memory(gl.uint8, [STAGES, WARPS, OUTPUTS, SLICE], BYTES)
    second = first
    third = first
    if GROUPS == 3:
        second = gl.allocate_shared_memory(gl.uint8, [STAGES, WARPS, OUTPUTS, SLICE], BYTES)
        third = gl.allocate_shared_memory(gl.uint8, [STAGES, WARPS, OUTPUTS, SLICE], BYTES)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, WARPS, ROWS, 64], INPUTS)
    high_xs = xs
    if IS_4_BIT:
        high_xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, WARPS, ROWS, 64], INPUTS)
    there, used = make_barriers(STAGES, 1), make_barriers(STAGES, GROUPS)
    fence_async_shared()
    begin = gl.program_id(2) * split_steps
    count = gl.minimum(split_steps, num_steps - begin)
    inputs = (xs, high_xs, there, used)
    if IS_4_BIT:
        given = (squares, eps, num_in, bias, residual, norm, num_rows, num_out, None, None)
    else:
        given = (squares, eps, num_in, bias, residual, norm, num_rows, num_out, scale, None)
    results = (out, weighted, made, partials, arrived)
    table = (scale, num_words, words_stride)
    TILE: gl.constexpr = (OUTPUTS, ROWS, WARPS, STAGES, GROUPS)
    weights, span = (first, second, third), (begin, count)
    FORM: gl.constexpr = (PARTS, GATE, SPLITS, IS_4_BIT)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_compute, (first, 0, inputs, table, given, results, span, FORM, TILE, DEPENDENT)),
                (_fetch, (weights, inputs, x, high_x, weight, span, GATE, IS_4_BIT, TILE, DEPENDENT)),
            ],
            [1],
            [FETCH_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (first, 0, inputs, table, given, results, span, FORM, TILE, DEPENDENT)),
                (_compute, (second, 1, inputs, table, given, results, span, FORM, TILE, DEPENDENT)),
                (_compute, (third, 2, inputs, table, given, results, span, FORM, TILE, DEPENDENT)),
                (_fetch, (weights, inputs, x, high_x, weight, span, GATE, IS_4_BIT, TILE, DEPENDENT)),
            ],
            [4, 4, 1],
            [GROUP_REGISTERS, GROUP_REGISTERS, FETCH_REGISTERS],
        )


@gluon.jit
def _fetch(
    weights,
    inputs,
    x,
    high_x,
    weight,
    span,
    GATE: gl.constexpr,
    IS_4_BIT: gl.constexpr,
    TILE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The producer warp: loads weights until the pipeline is full, then x when it is ready, then the rest of both."""
    STAGES: gl.constexpr = TILE[3]
    used = inputs[3]
    begin, count = span
    ready = gl.minimum(count, STAGES)
    for step in range(ready):
        _copy_weight(weights, inputs, weight, begin + step, step, GATE, IS_4_BIT, TILE)
    wait_for_previous(DEPENDENT)
    for step in range(ready):
        _copy_x(inputs, x, high_x, begin + step, step, IS_4_BIT, TILE)
    for step in range(ready, count):
        stage = step % STAGES
        mbarrier.wait(used.index(stage), (step // STAGES & 1) ^ 1)
        _copy_weight(weights, inputs, weight, begin + step, stage, GATE, IS_4_BIT, TILE)
        _copy_x(inputs, x, high_x, begin + step, stage, IS_4_BIT, TILE)


@gluon.jit
def _copy_weight(weights, inputs, weight, step, stage, GATE: gl.constexpr, IS_4_BIT: gl.constexpr, TILE: gl.constexpr):
    """Starts the weight copies of one stage. The barrier of the stage counts the bytes of x too."""
    OUTPUTS: gl.constexpr = TILE[0]
    ROWS: gl.constexpr = TILE[1]
    WARPS: gl.constexpr = TILE[2]
    PARTS: gl.constexpr = 2 if GATE else 1  # gate rows, and below them the up rows of the same outputs
    SIZE: gl.constexpr = OUTPUTS // PARTS
    BOX: gl.constexpr = gl.NVMMASharedLayout(64, 8, 4)
    GROUPS: gl.constexpr = TILE[4]
    bar = inputs[2].index(stage)
    mbarrier.expect(bar, WARPS * (GROUPS * OUTPUTS * SLICE + ROWS * 128 * (2 if IS_4_BIT else 1)))
    for group in gl.static_range(GROUPS):
        block = gl.program_id(1) * GROUPS + group
        target = weights[group].index(stage)._reinterpret(gl.uint8, [WARPS, PARTS, SIZE, SLICE], BOX)
        tma.async_copy_global_to_shared(weight, [step * WARPS, 0, block * SIZE, 0], bar, target)


@gluon.jit
def _copy_x(inputs, x, high_x, step, stage, IS_4_BIT: gl.constexpr, TILE: gl.constexpr):
    xs, high_xs, there, used = inputs
    ROWS: gl.constexpr = TILE[1]
    WARPS: gl.constexpr = TILE[2]
    row, bar = gl.program_id(0) * ROWS, there.index(stage)
    tma.async_copy_global_to_shared(x, [step * WARPS, row, 0], bar, xs.index(stage))
    if IS_4_BIT:
        tma.async_copy_global_to_shared(high_x, [step * WARPS, row, 0], bar, high_xs.index(stage))


@gluon.jit
def _compute(
    ws,
    GROUP: gl.constexpr,
    inputs,
    table,
    given,
    results,
    span,
    FORM: gl.constexpr,  # PARTS, GATE, SPLITS, IS_4_BIT
    TILE: gl.constexpr,  # OUTPUTS, ROWS, WARPS, STAGES, GROUPS
    DEPENDENT: gl.constexpr,
):
    """The consumer warps of one block: conversion, MMA and epilogue."""
    PARTS: gl.constexpr = FORM[0]
    GATE: gl.constexpr = FORM[1]
    SPLITS: gl.constexpr = FORM[2]
    IS_4_BIT: gl.constexpr = FORM[3]
    GROUPS: gl.constexpr = TILE[4]
    OUTPUTS: gl.constexpr = TILE[0]
    ROWS: gl.constexpr = TILE[1]
    WARPS: gl.constexpr = TILE[2]
    STAGES: gl.constexpr = TILE[3]
    xs, high_xs, there, used = inputs
    begin, count = span
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, gl.num_warps() // WARPS, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 16)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 16)
    block = gl.program_id(1) * GROUPS + GROUP
    row = gl.program_id(0) * ROWS
    # three blocks of 16 rows have registers for the weights of half of the outputs at a time
    IN_HALVES: gl.constexpr = IS_4_BIT and GROUPS == 3 and ROWS == 16
    SOME: gl.constexpr = OUTPUTS // 2 if IN_HALVES else OUTPUTS
    if IS_4_BIT:
        words = _load_words(table, given, begin, block, 0, SOME, GATE, LEFT, TILE)
        if IN_HALVES:
            other_words = _load_words(table, given, begin, block, SOME, SOME, GATE, LEFT, TILE)
    wait_for_previous(DEPENDENT)
    operands = load_operands(given, row, block, PARTS, GATE, OUTPUTS, ROWS)
    acc = gl.zeros([WARPS, SOME, ROWS], gl.float32, SUMS)
    if IN_HALVES:
        other = gl.zeros([WARPS, SOME, ROWS], gl.float32, SUMS)
    for step in range(count):
        stage = step % STAGES
        if IS_4_BIT:
            own_words = words
            words = _load_words(table, given, begin + step + 1, block, 0, SOME, GATE, LEFT, TILE)
        if IN_HALVES:
            own_other_words = other_words
            other_words = _load_words(table, given, begin + step + 1, block, SOME, SOME, GATE, LEFT, TILE)
        mbarrier.wait(there.index(stage), step // STAGES & 1)
        q = ws.index(stage).slice(0, SOME, 1).load(LEFT)
        right = xs.index(stage).permute((0, 2, 1)).load(RIGHT)
        if IS_4_BIT:
            right = _as_bytes_lie(right)
            high_right = _as_bytes_lie(high_xs.index(stage).permute((0, 2, 1)).load(RIGHT))
        if IN_HALVES:
            # a chain of MMAs of its own, as in `_multiply_4_bits`
            total = _sum_inputs(right, high_right, SUMS, LEFT)
            acc = _multiply_4_bits(q, own_words, right, high_right, total, acc, SUMS)
            q = ws.index(stage).slice(SOME, SOME, 1).load(LEFT)
        if step + STAGES < count:  # the producer waits for this stage
            gl.thread_barrier()  # all warps have read
            mbarrier.arrive(used.index(stage), count=1)
        if IN_HALVES:
            other = _multiply_4_bits(q, own_other_words, right, high_right, total, other, SUMS)
        elif IS_4_BIT:
            total = _sum_inputs(right, high_right, SUMS, LEFT)
            acc = _multiply_4_bits(q, own_words, right, high_right, total, acc, SUMS)
        else:
            acc = mma_v2(_expand_fp8(q), right, acc)
    if IN_HALVES:
        acc = gl.permute(gl.join(acc, other), (0, 3, 1, 2))
        acc = gl.convert_layout(gl.reshape(acc, [WARPS, OUTPUTS, ROWS]), SUMS)
    gl.thread_barrier()  # all warps have read: shared memory is reused for the sums
    # the same memory with and without the dimension of the warps
    SHAPE: gl.constexpr = [WARPS, OUTPUTS, ROWS]
    ws._reinterpret(gl.float32, SHAPE, gl.SwizzledSharedLayout(8, 2, 4, [1, 2, 0])).store(acc)
    sums = ws._reinterpret(gl.float32, SHAPE, gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))
    gl.thread_barrier()
    finish(sums, operands, given, results, row, block, GATE, SPLITS, OUTPUTS, GROUPS, ROWS)


@gluon.jit
def _load_words(
    table,
    given,
    step,
    block,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    GATE: gl.constexpr,
    LEFT: gl.constexpr,
    TILE: gl.constexpr,
):
    """The words [WARPS, COUNT] of a step, of outputs from FIRST on: a scale, and its zero, for each slice and output; 0
    after the last."""
    words, num_words, stride = table
    OUTPUTS: gl.constexpr = TILE[0]
    WARPS: gl.constexpr = TILE[2]
    BY_SLICE: gl.constexpr = gl.SliceLayout(2, LEFT)
    num_out = given[7]
    lane = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, BY_SLICE))
    if GATE:
        SIZE: gl.constexpr = OUTPUTS // 2
        own = block * SIZE + lane % SIZE
        source = own + lane // SIZE * num_out
    else:
        own = block * OUTPUTS + lane
        source = own
    entry = step * WARPS + gl.arange(0, WARPS, gl.SliceLayout(1, BY_SLICE))
    mask = gl.expand_dims(entry < num_words, 1) & gl.expand_dims(own < num_out, 0)
    return gl.load(words + gl.expand_dims(entry * stride, 1) + gl.expand_dims(source, 0), mask=mask, other=0)


@gluon.jit
def _expand_fp8(q):
    return gl.inline_asm_elementwise(BFLOAT16_OF_FP8, "=r,=r,r", [q], dtype=gl.bfloat16, is_pure=True, pack=4)


@gluon.jit
def _by_output(value, SUMS: gl.constexpr):
    """[WARPS, OUTPUTS] as a factor of sums."""
    return gl.expand_dims(gl.convert_layout(value, gl.SliceLayout(2, SUMS)), 2)


@gluon.jit
def _more_of(words):
    """128 + zero, as float32: the zero in the first bits of the mantissa of 128."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0x43, 0x4055;", "=r,r", [words], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _sum_inputs(right, high_right, SUMS: gl.constexpr, LEFT: gl.constexpr):
    """The sums of x over the group of each warp [WARPS, 16, ROWS], equal in all 16 rows."""
    WARPS: gl.constexpr = right.shape[0]
    ones = gl.full([WARPS, 16, SLICE], 1.0, gl.bfloat16, LEFT)
    total = mma_v2(ones, right, gl.zeros([WARPS, 16, right.shape[2]], gl.float32, SUMS))
    return mma_v2(ones, high_right, total)


@gluon.jit
def _multiply_4_bits(q, words, right, high_right, total, acc, SUMS: gl.constexpr):
    """acc + the product of 4-bit weights [WARPS, outputs, 64 bytes] and x. MMAs do not wait for those of `total`."""
    factor = _by_output((words & -256).to(gl.float32, bitcast=True), SUMS)
    more = _by_output(_more_of(words), SUMS)
    low, high = _expand_4_bits(q)
    product = mma_v2(low, right, gl.zeros(acc.shape, gl.float32, SUMS))
    product = mma_v2(high, high_right, product)
    # each thread has the sums of its columns: nothing is exchanged
    copies = gl.permute(gl.join(total, total), (0, 3, 1, 2))
    if acc.shape[1] > 32:
        copies = gl.permute(gl.join(copies, copies), (0, 4, 1, 2, 3))
    return acc + (product - more * gl.convert_layout(gl.reshape(copies, acc.shape), SUMS)) * factor


@gluon.jit
def _expand_4_bits(q):
    """128 + q of low and of high bits; the second and the third of four adjacent numbers change places."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 b, c, d;
        shr.u32 b, $4, 8;
        shr.u32 c, $4, 4;
        shr.u32 d, $4, 12;
        lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $1, b, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $2, c, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $3, d, 0x000f000f, 0x43004300, 0xea;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [q],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _as_bytes_lie(x):
    """The second and the third of four adjacent inputs change places, as in `_expand_4_bits`."""
    return gl.inline_asm_elementwise(
        """{
        prmt.b32 $0, $2, $3, 0x5410;
        prmt.b32 $1, $2, $3, 0x7632;
        }""",
        "=&r,=&r,r,r",
        [x],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )
