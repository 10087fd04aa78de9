"""Whether the Hopper kernels of `linear` can take a call: device, Triton version, alignment of the operands."""

from __future__ import annotations

import torch

from slipstream.ops.hopper import has_hopper_kernels

SMALL_WEIGHT = 8 << 20  # elements; tile sizes and the choice of a kernel change here
MULTIPROCESSORS = 132  # of an H100 or H200
WIDE_OUTPUTS = 192  # of a program with three blocks
MIN_WIDE_ROWS, MAX_WIDE_ROWS = 33, 128
MAX_WIDE_PLAIN_ROWS = 96  # without a gated activation: the LM head
MIN_WIDE_INPUTS = 2048
MIN_WIDE_WAVES = 4  # of programs, for fewer rows: the LM head
NARROW_OUTPUTS, NARROWEST_OUTPUTS = 64, 48  # of a program with one block
MIN_NARROW_ROWS, MAX_NARROW_ROWS = 33, 80  # more were not measured
MIN_NARROW_PROGRAMS = 96
MIN_NARROW_INPUTS = 4096


def fills_wide_programs(rows: int, num_out: int, num_in: int) -> bool:
    """Whether programs of 192 outputs each keep at least 9 of 10 multiprocessors busy to the end, for a number of rows
    at which they were measured to be faster than cuBLAS. With fewer outputs per program x would be read as often as the
    weight."""
    are_busy = num_in >= MIN_WIDE_INPUTS and keeps_wide_programs_busy(num_out)
    return are_busy and MIN_WIDE_ROWS <= rows <= MAX_WIDE_ROWS


def has_wide_waves(num_out: int, num_in: int) -> bool:
    """Whether programs of 192 outputs each are so many that they are faster than programs of 64 with few rows too."""
    are_many = num_out >= MIN_WIDE_WAVES * MULTIPROCESSORS * WIDE_OUTPUTS
    return are_many and num_in >= MIN_WIDE_INPUTS and keeps_wide_programs_busy(num_out)


def keeps_wide_programs_busy(num_out: int) -> bool:
    programs = -(-num_out // WIDE_OUTPUTS)
    waves = -(-programs // MULTIPROCESSORS)
    return 10 * programs >= 9 * waves * MULTIPROCESSORS


def narrow_splits(rows: int, num_out: int, num_in: int) -> int:
    """Split-k of programs with 64 outputs each: 1 or 2 if one wave of programs keeps most multiprocessors busy, for a
    number of rows at which they were measured to be faster than cuBLAS between our other kernels; else 0."""
    if not MIN_NARROW_ROWS <= rows <= MAX_NARROW_ROWS or num_in < MIN_NARROW_INPUTS:
        return 0
    blocks = -(-num_out // NARROW_OUTPUTS)
    return next((num for num in (1, 2) if MIN_NARROW_PROGRAMS <= num * blocks <= MULTIPROCESSORS), 0)


def narrow_outputs(num_out: int) -> int:
    """Outputs of a program without split-k: 48 if these are still one wave, so that more multiprocessors have work and
    each loads less."""
    return NARROWEST_OUTPUTS if -(-num_out // NARROWEST_OUTPUTS) <= MULTIPROCESSORS else NARROW_OUTPUTS


def supports_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the Hopper kernels run on this device and TMA can load both operands: rows start at multiples of 16
    bytes (the element size is 2), and the elements of a row are contiguous."""
    aligned = (x.stride(0) | weight.stride(0)) % 8 == 0 and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    return aligned and x.stride(1) == weight.stride(1) == 1 and has_hopper_kernels(x.device)
