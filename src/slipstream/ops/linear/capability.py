"""Whether the Hopper kernels of `linear` can take a call: device, Triton version, alignment of the operands."""

from __future__ import annotations

import torch

from slipstream.ops.hopper import has_hopper_kernels

SMALL_WEIGHT = 8 << 20  # elements; tile sizes and the choice of a kernel change here
MULTIPROCESSORS = 132  # of an H100 or H200
WIDE_OUTPUTS = 192  # of a program with three blocks
MIN_WIDE_ROWS, MAX_WIDE_ROWS = 65, 96
MIN_WIDE_INPUTS = 2048


def fills_wide_programs(rows: int, num_out: int, num_in: int) -> bool:
    """Whether programs of 192 outputs each keep at least 9 of 10 multiprocessors busy to the end, for a number of rows
    at which they were measured to be faster than cuBLAS. With fewer outputs per program x would be read as often as the
    weight."""
    programs = -(-num_out // WIDE_OUTPUTS)
    waves = -(-programs // MULTIPROCESSORS)
    are_busy = num_in >= MIN_WIDE_INPUTS and 10 * programs >= 9 * waves * MULTIPROCESSORS
    return are_busy and MIN_WIDE_ROWS <= rows <= MAX_WIDE_ROWS


def supports_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the Hopper kernels run on this device and TMA can load both operands: rows start at multiples of 16
    bytes (the element size is 2), and the elements of a row are contiguous."""
    aligned = (x.stride(0) | weight.stride(0)) % 8 == 0 and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    return aligned and x.stride(1) == weight.stride(1) == 1 and has_hopper_kernels(x.device)
