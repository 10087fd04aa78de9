"""Inverse of a unit lower triangular matrix inside a kernel.

The diagonal blocks of 16 are inverted by forward substitution, all at once. With D their inverses and L the blocks
below, the matrix is D^-1 (I + D L), and D L is nilpotent: its fourth power is zero for four blocks. A power series of
the whole matrix would need one product less, but its terms grow with the binomials where keys are alike.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def invert_unit_lower(below, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + below)^-1 [SIZE, SIZE] in float32, for a strictly lower triangular `below`; SIZE is 64."""
    tl.static_assert(SIZE == 64)
    BLOCKS: tl.constexpr = SIZE // 16
    row = tl.arange(0, 16)
    block = tl.arange(0, BLOCKS)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.reshape(below, (BLOCKS, 16, BLOCKS, 16))
    diagonal = tl.sum(tl.where(is_diagonal, parts, 0.0), 2)  # [blocks, rows, columns]
    unit = (row[:, None] == row[None, :]).to(tl.float32)[None, :, :]
    solved = tl.zeros((BLOCKS, 16, 16), tl.float32) + unit
    for number in range(1, 16):
        is_row = (row == number)[None, :, None]
        own = tl.sum(tl.where(is_row, diagonal, 0.0), 1)  # [blocks, columns] of this row
        solved -= tl.where(is_row, tl.sum(own[:, :, None] * solved, 1)[:, None, :], 0.0)
    inner = tl.where(is_diagonal, solved[:, :, None, :], 0.0)
    inner = tl.reshape(inner, (SIZE, SIZE))
    index = tl.arange(0, SIZE)
    outer = tl.where(index[:, None] // 16 > index[None, :] // 16, below, 0.0)
    step = -tl.dot(inner, outer, input_precision=PRECISION)
    square = tl.dot(step, step, input_precision=PRECISION)
    series = step + square + tl.dot(square, step, input_precision=PRECISION)  # I is added below
    return inner + tl.dot(series, inner, input_precision=PRECISION)
