"""The end of Gluon GEMMs whose warps have different inputs: adds the sums of warps and splits, then the epilogue."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from slipstream.ops.gemm.linear.epilogue import store_results, target_of


@gluon.jit
def finish(
    sums,  # shared memory [warps, OUTPUTS, ROWS] float32, which all warps have written
    operands,
    given,
    results,
    row,
    block,
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Stores the results of a block of outputs; with split-k the last of its programs does."""
    WARPS: gl.constexpr = sums.shape[0]
    partials, arrived = results[3], results[4]
    rows, own, target, mask = target_of(given, row, block, GATE, OUTPUTS, ROWS)
    BY_ROW: gl.constexpr = mask.type.layout
    SIZE: gl.constexpr = OUTPUTS // 2 if GATE else OUTPUTS
    result = sums.index(0).slice(0, SIZE).load(BY_ROW)
    up = result  # unused without a gate
    if GATE:
        up = sums.index(0).slice(SIZE, SIZE).load(BY_ROW)
    for warp in gl.static_range(1, WARPS):
        result += sums.index(warp).slice(0, SIZE).load(BY_ROW)
        if GATE:
            up += sums.index(warp).slice(SIZE, SIZE).load(BY_ROW)
    is_last = True
    if SPLITS > 1:
        number = block * gl.num_programs(0) + gl.program_id(0)
        numbers = gl.num_programs(0) * gl.num_programs(1) * GROUPS
        lane = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(1, BY_ROW)), 1)
        where = partials + lane + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, BY_ROW)) * OUTPUTS, 0)
        start = (gl.program_id(2) * numbers + number).to(gl.int64) * (OUTPUTS * ROWS)
        gl.store(where + start, result)
        if GATE:
            gl.store(where + start + SIZE, up)
        # all threads store their partial sums before one increments the counter
        gl.thread_barrier()
        is_last = gl.atomic_add(arrived + number, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        gl.thread_barrier()
        if is_last:
            result = gl.zeros([SIZE, ROWS], gl.float32, BY_ROW)
            if GATE:
                up = gl.zeros([SIZE, ROWS], gl.float32, BY_ROW)
            for split in gl.static_range(SPLITS):
                start = (split * numbers + number).to(gl.int64) * (OUTPUTS * ROWS)
                result += gl.load(where + start, cache_modifier=".cg")
                if GATE:
                    up += gl.load(where + start + SIZE, cache_modifier=".cg")
            gl.store(arrived + number, 0)
    if is_last:
        store_results(result, up, operands, given, results, row, block, GATE, OUTPUTS, GROUPS, ROWS)


# Layouts of `row.py`: which thread holds what. Slices of a step are dimension 0 of all, one for each warp.
#
# A warp that multiplies has MMA row t * 16 + b * 8 + m for its lanes 4 * m to 4 * m + 3. Shared memory has the row r of
# eight at m = 2 * (r % 4) + r // 4: the eight lanes that read together then read rows r and r + 4, whose swizzles
# differ in the half of a row of 128 bytes.


@gluon.constexpr_function
def _bits(size):
    """The powers of two below `size`."""
    return [1 << bit for bit in range(size.bit_length() - 1)]


@gluon.constexpr_function
def _bases(size, unit, dim, rank):
    """The bases of `size` numbers of a dimension, `unit` apart."""
    return [[bit * unit if d == dim else 0 for d in range(rank)] for bit in _bits(size)]


@gluon.constexpr_function
def left_layout(warps, outputs):
    """Weights [warps / 2, outputs, 128 bytes]: a warp has 64 bytes of each row, a thread 16."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]] + _bases(outputs // 8, 8, 1, 3)
    lanes = [[0, 0, 16], [0, 0, 32], [0, 4, 0], [0, 1, 0], [0, 2, 0]]
    own = [[0, 0, 64]] + _bases(warps // 2, 1, 0, 3)
    return gl.DistributedLinearLayout(registers, lanes, own, [], [warps // 2, outputs, 128])


@gluon.constexpr_function
def column_layout(warps):
    """Inputs of an MMA [warps, 2, 4 columns, 64]: both fours of columns are the same."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]]
    lanes = [[0, 0, 0, 16], [0, 0, 0, 32], [0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _bases(warps, 1, 0, 4), [], [warps, 2, 4, 64])


@gluon.constexpr_function
def word_layout(warps, halves):
    """Words of the outputs 32 * half + 4 * r + j, [warps, halves, 8, 4]: a thread has those of one r."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2]] + _bases(halves, 1, 1, 4)
    lanes = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 4, 0], [0, 0, 1, 0], [0, 0, 2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _bases(warps, 1, 0, 4), [], [warps, halves, 8, 4])


@gluon.constexpr_function
def row_layout(steps, warps):
    """Inputs to quantise [steps, warps, 64]: 8 adjacent ones per thread, 4 if there are few steps."""
    columns, others = [[0, 0, bit] for bit in _bits(64)], [[bit, 0, 0] for bit in _bits(steps)]
    own = 3 if steps >= 4 else 2
    lanes = (columns[own:] + others + [[0, 0, 0]])[:5]
    registers = columns[:own] + others[5 - len(columns[own:]) :]
    return gl.DistributedLinearLayout(registers, lanes, [[0, bit, 0] for bit in _bits(warps)], [], [steps, warps, 64])
