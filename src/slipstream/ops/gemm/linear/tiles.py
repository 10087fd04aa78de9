"""The GEMMs of a CPU, and whether the Hopper kernels can take a call."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F

from slipstream.ops.platform import native, prebuilt
from slipstream.ops.platform.dispatch import has_hopper_kernels
from slipstream.ops.platform.native import LAYOUTS


def linear_transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """weight: [in, out]. The library for ARM reads this layout a fifth faster and adds the bias in its epilogue."""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


# GEMM of many tokens by AMX tiles, with the precision of float32, on x86 processors that have them.
#
# `native_gemm_amx.h` splits float32 numbers into three bfloat16 parts. Weights are float32 or bfloat16.

MIN_TOKENS = 17  # not measured for fewer: the C kernel for few tokens takes those


def accepts(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if len(x) < MIN_TOKENS or weight.dtype not in LAYOUTS or not weight.is_contiguous() or not native.serves(x):
        return False
    library = native.library()
    return library is not None and bool(library.slip_has_gemm())


def tile_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    library = native.library()
    assert library is not None
    x = x.contiguous()
    out = torch.empty(len(x), len(weight), dtype=torch.float32)
    sizes = (LAYOUTS[weight.dtype], len(x), len(weight), x.shape[1])
    if not library.slip_gemm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *sizes):
        raise MemoryError(f"out of memory for the split activations of a GEMM of {len(x)} tokens")
    return out if bias is None else out.add_(bias)


# Whether the Hopper kernels of `linear` can take a call: device, Triton version, alignment of the operands.

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


# Skinny GEMM in C for few tokens, on CPUs where it reads weights faster than torch's library.

ON_ARM = platform.machine().lower() in ("aarch64", "arm64")
# Measured: on ARM torch reaches half of the memory bandwidth; with AVX-512 both are as fast at 16 tokens, and ours
# takes half of the time at 8. Not measured on other processors.
MAX_TOKENS = 32 if ON_ARM else 16 if "avx512f" in prebuilt.processor_features() else 0
# of bfloat16 weights: the kernel's time is proportional to the tokens, that of widening is not
MAX_WIDENED_TOKENS = 32 if ON_ARM else 16


def native_accepts(x: torch.Tensor, weight: torch.Tensor) -> bool:
    limit = MAX_TOKENS if weight.dtype is x.dtype else MAX_WIDENED_TOKENS
    return len(x) <= limit and native.serves(x) and weight.dtype in LAYOUTS and weight.is_contiguous()


def skinny_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    library = native.library()
    assert library is not None
    x = x.contiguous()
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, len(weight), dtype=torch.float32)
    layout = LAYOUTS[weight.dtype]
    library.slip_skinny_gemm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), layout, num_tokens, len(weight), size)
    return out if bias is None else out.add_(bias)


# GEMM of float32 activations and bfloat16 weights on a CPU, computed in float32.
#
# A bfloat16 value is the upper half of a float32 value, so the result is that of the same weights in float32, and the
# weights take half of the memory and of the memory bandwidth. With few tokens our C kernel widens the weights in
# registers. With more tokens AMX tiles multiply, or the weights are widened into a buffer, a part of the rows at a
# time, and the library multiplies.

_PART = 1 << 21  # weights widened at a time: 8 MiB


def widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] float32, weight [out, in] bfloat16 to [T, out] float32."""
    num_rows = max(1, _PART // max(1, weight.shape[1]))
    if len(weight) <= num_rows:
        return F.linear(x, weight.float(), bias)
    out = x.new_empty(len(x), len(weight))
    for first in range(0, len(weight), num_rows):
        rows = slice(first, first + num_rows)
        out[:, rows] = F.linear(x, weight[rows].float(), None if bias is None else bias[rows])
    return out
