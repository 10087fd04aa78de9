"""Layouts of `row_kernel.py`: which thread holds what. Slices of a step are dimension 0 of all, one for each warp.

A warp that multiplies has MMA row t * 16 + b * 8 + m for its lanes 4 * m to 4 * m + 3. Shared memory has the row r of
eight at m = 2 * (r % 4) + r // 4: the eight lanes that read together then read rows r and r + 4, whose swizzles differ
in the half of a row of 128 bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
