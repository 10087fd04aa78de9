"""The kernel of `row.py`, in Gluon: a single row of x times 4-bit weights by integer MMAs.

A step loads WARPS slices of 64 bytes, 128 inputs, of each weight row and their scales and zeros by TMA. A consumer warp
multiplies one slice for all outputs of the program. The warps quantise x at their start: 64 inputs that share a scale
become integers of 16 bits, 256 * high + low, which are two columns of the MMA. Weights need two instructions for 8
numbers: the low bits of a byte are an integer q, and its high bits, with the first bit inverted, are 16 * (q - 8). The
inputs of low and of high bits have columns of their own, so that their sums are apart:

    column           0      1      2      3      4 to 7
    inputs of bits   low    low    high   high   as 0 to 3
    byte of x        high   low    high   low

    sum of a group = scale * sum over low and high bits of x_scale * (256 * even column + odd column - zero * sum of x)

An odd column starts at the last term. MMA rows are outputs in an order in which a thread has the scales of 4 adjacent
outputs. Integer sums are exact; what is rounded is x, and the sum over groups in float32.
Compiled by `tests/ops/test_kernels_compile.py`, run by `pytest -m cuda`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.gemm.chains import StreamingRows, Unnormalized
from slipstream.ops.gemm.linear.epilogue import GATES, load_operands, split_memory
from slipstream.ops.gemm.linear.streaming_kernel import FETCH_REGISTERS
from slipstream.ops.gemm.linear.tiles import MULTIPROCESSORS
from slipstream.ops.gemm.quantized.matrix import QuantizedMatrix
from slipstream.ops.gemm.quantized.warp_sums import (
    column_layout,
    finish,
    left_layout,
    row_layout,
    word_layout,
)
from slipstream.ops.platform.pdl import dependent, make_barriers, release_next, wait_for_previous

SLICE = gl.constexpr(64)  # bytes of a weight row that a warp multiplies in a step
LARGEST = gl.constexpr(32512.0)  # of the integers of x: the high byte of LARGEST + 128 is 127
ROUNDING = gl.constexpr(12583040.0)  # 1.5 * 2 ** 23 + 128: added to x, the last bits are x + 128 as an integer
ROUNDING_BITS = gl.constexpr(0x4B400080)


# grid: (1, blocks of outputs, splits)
@gluon.jit
def row_kernel(
    x,  # [num_in] bfloat16
    weight,  # descriptors of `row.py`
    words,
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
    num_out,
    num_in,
    PARTS: gl.constexpr,
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    OUTPUTS: gl.constexpr,  # of a program, gate and up rows together: 64, or 32 without a gate
    WARPS: gl.constexpr,  # slices of a step
    STEPS: gl.constexpr,  # of a split; after the last group TMA writes zeros
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    release_next(DEPENDENT)
    ws = gl.allocate_shared_memory(gl.uint8, [STAGES, WARPS // 2, OUTPUTS, 2 * SLICE], gl.NVMMASharedLayout(128, 8, 3))
    tables = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, OUTPUTS // 32, 32], gl.NVMMASharedLayout(0, 32, 3))
    # with one allocation for all stages the compiler puts a barrier of all warps between two waits
    there = ()
    for _ in gl.static_range(STAGES):
        there += (make_barriers(1, 1).index(0),)  # type: ignore[assignment]
    used = make_barriers(STAGES, 1)
    fence_async_shared()
    given = (squares, eps, num_in, bias, residual, norm, 1, num_out, None, None)
    results = (out, weighted, made, partials, arrived)
    ring = (ws, tables, there, used)
    FORM: gl.constexpr = (PARTS, GATE, SPLITS, OUTPUTS, WARPS, STEPS, STAGES)
    gl.warp_specialize(
        [
            (_compute, (x, ring, given, results, FORM, DEPENDENT)),
            (_fetch, (ring, weight, words, FORM)),
        ],
        [1],
        [FETCH_REGISTERS],
    )


@gluon.jit
def _fetch(ring, weight, words, FORM: gl.constexpr):
    """The producer warp. What it loads depends on no kernel."""
    ws, tables, there, used = ring
    HALVES: gl.constexpr = FORM[3] // 32
    WARPS: gl.constexpr = FORM[4]
    STEPS: gl.constexpr = FORM[5]
    STAGES: gl.constexpr = FORM[6]
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 8, 5)
    block = gl.program_id(1)
    for step in gl.static_range(STEPS):
        bar = there[step % STAGES]
        if step >= STAGES:
            mbarrier.wait(used.index(step % STAGES), (step // STAGES & 1) ^ 1)
        mbarrier.expect(bar, WARPS * HALVES * 32 * (SLICE + 4))
        entry = (gl.program_id(2) * STEPS + step) * WARPS
        target = ws.index(step % STAGES)._reinterpret(gl.uint8, [WARPS // 2, HALVES, 4, 8, 2 * SLICE], BOX)
        table = tables.index(step % STAGES)
        if FORM[1]:
            tma.async_copy_global_to_shared(weight, [entry // 2, 0, 0, block * 8, 0], bar, target)
            tma.async_copy_global_to_shared(words, [entry, 0, block * 32], bar, table)
        else:
            tma.async_copy_global_to_shared(weight, [entry // 2, block * HALVES, 0, 0, 0], bar, target)
            tma.async_copy_global_to_shared(words, [entry, block * HALVES, 0], bar, table)


@gluon.jit
def _compute(
    x,
    ring,
    given,
    results,
    FORM: gl.constexpr,  # PARTS, GATE, SPLITS, OUTPUTS, WARPS, STEPS, STAGES
    DEPENDENT: gl.constexpr,
):
    """The consumer warps: quantisation of x, MMA and epilogue."""
    GATE: gl.constexpr = FORM[1]
    OUTPUTS: gl.constexpr = FORM[3]
    WARPS: gl.constexpr = FORM[4]
    STEPS: gl.constexpr = FORM[5]
    PADDED: gl.constexpr = triton.next_power_of_2(STEPS)
    block = gl.program_id(1)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 1, 1, 16], [1, 2, 4, 4], [1, WARPS, 1, 1], [3, 2, 1, 0])
    low_x = gl.allocate_shared_memory(gl.int8, [PADDED, WARPS, 4, SLICE], PLAIN)
    high_x = gl.allocate_shared_memory(gl.int8, [PADDED, WARPS, 4, SLICE], PLAIN)
    zeros = gl.zeros([PADDED, WARPS, 4, SLICE], gl.int8, ZEROS)  # columns of the other half of the inputs
    _all_steps(low_x, gl.int8).store(zeros)
    _all_steps(high_x, gl.int8).store(zeros)
    scales = gl.allocate_shared_memory(gl.float32, [PADDED, WARPS, 4], FLAT)
    slopes = gl.allocate_shared_memory(gl.int32, [PADDED, WARPS, 4], FLAT)
    starts = gl.allocate_shared_memory(gl.int32, [PADDED, WARPS, 4], FLAT)
    gl.thread_barrier()
    wait_for_previous(DEPENDENT)
    first = gl.program_id(2) * (STEPS * WARPS * 2 * SLICE)
    low = _load_x(x, first, given[2], PADDED, WARPS)
    high = _load_x(x, first + SLICE, given[2], PADDED, WARPS)
    operands = load_operands(given, 0, block, FORM[0], GATE, OUTPUTS, 1)
    low_scale, low_sum = _quantize(low, _all_steps(low_x, gl.int8).slice(0, 2, 2))
    high_scale, high_sum = _quantize(high, _all_steps(high_x, gl.int8).slice(2, 2, 2))
    # columns are there twice, and sums of high bits are 16 times too large
    _store_pairs(low_scale * 0.5, high_scale * (0.5 / 16), scales)
    _store_pairs(-low_sum, high_sum * -16, slopes)
    _store_pairs(low_sum * 0, high_sum * 128, starts)
    gl.thread_barrier()

    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    pairs = gl.reshape(gl.zeros([WARPS, OUTPUTS, 8], gl.float32, SUMS), [WARPS, OUTPUTS, 4, 2])
    acc, unused = gl.split(pairs)
    inputs = (low_x, high_x, scales, slopes, starts)
    for step in gl.static_range(STEPS):
        acc = _multiply(acc, inputs, ring, step, STEPS, FORM[6], SUMS)
    # from the order of MMA rows to that of outputs
    total = gl.sum(acc, 2)
    total = gl.permute(gl.reshape(total, [WARPS, OUTPUTS // 32, 4, 4, 2]), (0, 1, 4, 3, 2))
    total = gl.reshape(total, [WARPS, OUTPUTS, 1])
    sums_of_warps = gl.allocate_shared_memory(gl.float32, [WARPS, OUTPUTS, 1], FLAT)
    sums_of_warps._reinterpret(gl.float32, [WARPS, OUTPUTS, 1], PLAIN).store(total)
    gl.thread_barrier()
    finish(sums_of_warps, operands, given, results, 0, block, GATE, FORM[2], OUTPUTS, 1, 1)


@gluon.jit
def _multiply(
    acc,
    inputs,
    ring,
    step: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    SUMS: gl.constexpr,
):
    """The MMAs of a step: adds the sums of WARPS slices to acc [WARPS, OUTPUTS, 4], one for each pair of columns."""
    low_x, high_x, scales, slopes, starts = inputs
    ws, tables, there, used = ring
    WARPS: gl.constexpr = acc.shape[0]
    OUTPUTS: gl.constexpr = acc.shape[1]
    PAIRS: gl.constexpr = acc.type.layout
    low_right, high_right = _load_right(low_x.index(step), SUMS), _load_right(high_x.index(step), SUMS)
    factor = _by_pair(scales.index(step), PAIRS)
    slope = _by_pair(slopes.index(step), PAIRS)
    start = _by_pair(starts.index(step), PAIRS)
    mbarrier.wait(there[step % STAGES], step // STAGES & 1)
    codes = _load_words(tables.index(step % STAGES), PAIRS)
    q = _load_left(ws.index(step % STAGES), SUMS)
    if step + STAGES < STEPS:  # the producer waits for this stage
        gl.thread_barrier()  # all warps have read
        mbarrier.arrive(used.index(step % STAGES), count=1)
    odd = (codes & 255) * slope + start
    sums = gl.reshape(gl.join(gl.zeros_like(odd), odd), [WARPS, OUTPUTS, 8])
    left, high_left = _expand(q)
    sums = mma_v2(left, low_right, gl.convert_layout(sums, SUMS, assert_trivial=True))
    sums = mma_v2(high_left, high_right, sums)
    even, odd = gl.split(gl.reshape(sums, [WARPS, OUTPUTS, 4, 2]))
    # the last bits of a scale are its zero, which adds less than 2 ** -16 of it
    return acc + (even * 256 + odd).to(gl.float32) * (codes.to(gl.float32, bitcast=True) * factor)


@gluon.jit
def _load_x(x, first, num_in, STEPS: gl.constexpr, WARPS: gl.constexpr):
    """64 of the 128 inputs of each slice of the program [STEPS, WARPS, 64]."""
    ROWS: gl.constexpr = row_layout(STEPS, WARPS)
    step = gl.arange(0, STEPS, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))
    entry = gl.expand_dims(step, 1) * WARPS + gl.expand_dims(warp, 0)
    column = first + gl.arange(0, SLICE, gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))
    at = gl.expand_dims(entry, 2) * (2 * SLICE) + gl.expand_dims(gl.expand_dims(column, 0), 1)
    return gl.load(x + at, mask=at < num_in, other=0.0).to(gl.float32)


@gluon.jit
def _all_steps(xs, kind: gl.constexpr):
    """The same memory, with the steps as a dimension of tensors."""
    return xs._reinterpret(kind, xs.shape, gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))


@gluon.jit
def _quantize(x, target):
    """Writes the high and low bytes of x [STEPS, WARPS, 64] to `target` [STEPS, WARPS, 2, 64]; returns the scales and
    the sums of the integers [STEPS, WARPS]. An x that is not a number makes its scale one."""
    bits = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    largest = gl.maximum(bits, 0x0DA24260).to(gl.float32, bitcast=True)  # 1e-30
    rounded = x * gl.expand_dims(LARGEST / largest, 2) + ROUNDING
    value = rounded.to(gl.int32, bitcast=True)
    high, low = _split_bytes(value)
    target.store(gl.permute(gl.join(high, low), (0, 1, 3, 2)))
    return largest * (1 / LARGEST), gl.sum(value - ROUNDING_BITS, 2)


@gluon.jit
def _split_bytes(value):
    """The second byte of an integer, and its first byte less 128."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        prmt.b32 a, $2, $3, 0x5410;
        prmt.b32 b, $4, $5, 0x5410;
        prmt.b32 $0, a, b, 0x7531;
        prmt.b32 $1, a, b, 0x6420;
        xor.b32 $1, $1, 0x80808080;
        }""",
        "=&r,=&r,r,r,r,r",
        [value],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _store_pairs(low, high, target):
    """Writes two numbers of each slice [STEPS, WARPS] to `target` [STEPS, WARPS, 4], twice."""
    both = gl.join(low, high)
    twice = gl.permute(gl.join(both, both), (0, 1, 3, 2))
    whole = target._reinterpret(twice.dtype, target.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    whole.store(gl.reshape(twice, target.shape))


@gluon.jit
def _load_left(ws, SUMS: gl.constexpr):
    """Weights of a step as the left operand [WARPS, OUTPUTS, 64]."""
    WARPS: gl.constexpr = 2 * ws.shape[0]
    OUTPUTS: gl.constexpr = ws.shape[1]
    BYTES: gl.constexpr = left_layout(WARPS, OUTPUTS)
    parts = gl.permute(gl.reshape(ws.load(BYTES), [WARPS // 2, OUTPUTS // 8, 2, 4, 2, SLICE]), (0, 4, 1, 3, 2, 5))
    left = gl.reshape(parts, [WARPS, OUTPUTS, SLICE])
    return gl.convert_layout(left, gl.DotOperandLayout(0, SUMS, 16), assert_trivial=True)


@gluon.jit
def _load_right(xs, SUMS: gl.constexpr):
    """x of a step as the right operand [WARPS, 64, 8], from 4 columns in shared memory [WARPS, 4, 64]."""
    WARPS: gl.constexpr = xs.shape[0]
    COLUMNS: gl.constexpr = column_layout(WARPS)
    columns = gl.expand_dims(xs.load(gl.SliceLayout(1, COLUMNS)), 1)
    lower, upper = gl.broadcast(columns, gl.zeros([WARPS, 2, 4, SLICE], gl.int8, COLUMNS))
    eight = gl.permute(gl.reshape(lower, [WARPS, 8, SLICE]), (0, 2, 1))
    return gl.convert_layout(eight, gl.DotOperandLayout(1, SUMS, 16), assert_trivial=True)


@gluon.jit
def _by_pair(numbers, PAIRS: gl.constexpr):
    return gl.expand_dims(numbers.load(gl.SliceLayout(1, PAIRS)), 1)


@gluon.jit
def _load_words(table, PAIRS: gl.constexpr):
    """The words of a step [WARPS, OUTPUTS, 1], in the order of MMA rows."""
    WARPS: gl.constexpr = table.shape[0]
    HALVES: gl.constexpr = table.shape[1]
    WORDS: gl.constexpr = word_layout(WARPS, HALVES)
    plain = table._reinterpret(gl.int32, [WARPS, HALVES, 8, 4], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    words = plain.load(WORDS)
    flat = gl.permute(gl.reshape(words, [WARPS, HALVES, 2, 4, 4]), (0, 1, 4, 3, 2))
    flat = gl.reshape(flat, [WARPS, HALVES * 32])
    return gl.expand_dims(gl.convert_layout(flat, gl.SliceLayout(2, PAIRS), assert_trivial=True), 2)


@gluon.jit
def _expand(q):
    """q of low bits, and 16 * (q - 8) of high bits."""
    return gl.inline_asm_elementwise(
        """{
        lop3.b32 $0, $2, 0x0f0f0f0f, 0, 0xc0;
        lop3.b32 $1, $2, 0x80808080, 0xf0f0f0f0, 0x28;
        }""",
        "=&r,=&r,r",
        [q],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )


# GEMM of a single row with 4-bit weights on Hopper: TMA streams the weights, integer MMAs multiply.
#
# `streaming.py` calls this for one row. The kernel rounds x to integers of 16 bits with a scale for 64 inputs, which
# adds less error than rounding to bfloat16 does unless one of the 64 is hundreds of times larger than the others. The
# shape alone fixes the order of every sum. Written in Gluon, which has no interpreter:
# `tests/ops/test_kernels_compile.py` compiles it on any machine, `pytest -m cuda` runs it, `matrix.py` has its
# arithmetic.

MEMORY = 222 << 10  # bytes of shared memory for all programs on a multiprocessor
INPUT_BYTES = 8 * SLICE.value + 48  # of x, per slice: 4 columns of both halves, scale and sums
MAX_STEPS = 16  # whose x leaves room for weights; the loop over them is unrolled
MAX_SPLITS = 6


class RowTile(NamedTuple):
    splits: int  # split-k
    outputs: int = 64  # per program, gate and up rows together; 32 if there is no gate
    slices: int = 4  # of 128 inputs per step, one for each warp
    programs: int = 3  # per multiprocessor
    groups: int = 1  # as in `SliceTile`


def takes_row(weight: QuantizedMatrix, rows: int, is_gated: bool) -> bool:
    """Whether `launch_row` takes a weight with slices: blocks of outputs and pairs of slices are whole."""
    words = weight.words
    if rows != 1 or not weight.is_4_bit or words is None:
        return False
    is_aligned = words.stride(1) == 1 and words.stride(0) % 4 == 0 and words.data_ptr() % 16 == 0
    return is_aligned and weight.num_columns % 256 == 0 and len(weight.values) % (64 if is_gated else 32) == 0


def row_tile(weight: QuantizedMatrix, is_gated: bool = False) -> RowTile:
    """Measured on an H200 at the shapes of Qwen3-8B: 8 warps per program and no split-k if a program can have the whole
    row of x. Else programs of 4 warps, three on a multiprocessor, and split-k if that is not one wave of them."""
    num_out, num_in = len(weight.values), weight.num_columns
    if not is_gated and num_in <= 8192 and num_out <= 64 * MULTIPROCESSORS:
        return RowTile(1, 32, 8, programs=1 if num_out <= 32 * MULTIPROCESSORS else 2)
    if is_gated and num_in <= 8192 and num_out <= 64 * MULTIPROCESSORS:
        return RowTile(1, 64, 8, programs=1)
    steps = triton.cdiv(num_in, 512)
    wanted = min(MAX_SPLITS, 3 * MULTIPROCESSORS // triton.cdiv(num_out, 64))
    return RowTile(max(1, wanted, triton.cdiv(steps, MAX_STEPS)))


def row_stages(tile: RowTile, steps: int) -> int:
    """As many stages as fit beside x; no more than there are steps."""
    inputs = tile.slices * INPUT_BYTES * triton.next_power_of_2(steps)
    room = MEMORY // tile.programs - inputs - 2048  # barriers, sums of the warps
    return max(1, min(steps, room // (tile.slices * tile.outputs * (SLICE.value + 4))))


def row_registers(tile: RowTile) -> int:
    """Per thread at the launch, of which the producer warp gives most to the others. No more than they need: with the
    rest the next kernel starts, and loads its weights."""
    return min(96, 65536 // (tile.programs * (tile.slices + 4) * 32) // 8 * 8)


def launch_row(
    inputs: torch.Tensor | Unnormalized,
    weight: QuantizedMatrix,
    bias: torch.Tensor | None,
    gate: str,
    out: torch.Tensor,
    tile: RowTile,
    residual: torch.Tensor | None = None,
    made: Unnormalized | None = None,
) -> None:
    given = StreamingRows.of(inputs)
    x, squares = given.x, given.squares
    num_in = x.shape[1]
    blocks = triton.cdiv(len(weight.values), tile.outputs)
    steps = triton.cdiv(num_in, 2 * SLICE.value * tile.slices)
    split_steps = triton.cdiv(steps, tile.splits)
    splits = triton.cdiv(steps, split_steps)
    memory = split_memory(weight.values, splits, blocks, tile.outputs)
    row_kernel[(1, blocks, splits)](
        x,
        _describe_weight(weight, bool(gate), tile),
        _describe_words(weight, bool(gate), tile),
        *given.arguments(bias, residual, out, made),
        *memory,
        out.shape[1],
        num_in,
        PARTS=0 if squares is None else squares.shape[1],
        GATE=GATES[gate],
        SPLITS=splits,
        OUTPUTS=tile.outputs,
        WARPS=tile.slices,
        STEPS=split_steps,
        STAGES=row_stages(tile, split_steps),
        num_warps=tile.slices,
        maxnreg=row_registers(tile),
        **dependent(x.device, 1),
    )


def _describe_weight(weight: QuantizedMatrix, is_gated: bool, tile: RowTile) -> Any:
    """[pairs of slices, halves of 32 outputs, 4, 8, 128 bytes]; gated: [pairs of slices, gate and up, 4, outputs / 4,
    128 bytes]. An output is 4 * r + j of its half: copies have j before r, so that a thread has four adjacent ones."""
    values = weight.values
    rows, num_bytes = values.shape
    shape = [num_bytes // 128, 2 if is_gated else rows // 32, 4, rows // 8 if is_gated else 8, 128]
    strides = [128, (rows // 2 if is_gated else 32) * num_bytes, num_bytes, 4 * num_bytes, 1]
    box = [tile.slices // 2, tile.outputs // 32, 4, 8, 128]
    return TensorDescriptor(values, shape, strides, box, gl.NVMMASharedLayout(128, 8, 5))


def _describe_words(weight: QuantizedMatrix, is_gated: bool, tile: RowTile) -> Any:
    """[groups, halves of 32 outputs, 32]; gated: [groups, gate and up, outputs]"""
    words = weight.words
    assert words is not None
    groups, rows = words.shape
    parts = 2 if is_gated else rows // 32
    shape, strides = [groups, parts, rows // parts], [words.stride(0), rows // parts, 1]
    box = [tile.slices, tile.outputs // 32, 32]
    return TensorDescriptor(words, shape, strides, box, gl.NVMMASharedLayout(0, 32, 3))
