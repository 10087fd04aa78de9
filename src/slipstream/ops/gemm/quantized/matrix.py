"""QuantizedMatrix: a weight [rows, columns] of 8 or 4 bits with a scale for each group of columns of a row.

    weight = scale * (q - zero)        symmetric: `zero` is one number for the matrix
    weight = scale * (q - zeros)       a zero for each scale
    weight = scale * q + minima        a minimum for each scale (GGUF)
    weight = scale * codebook[q]       16 numbers, one for each 4-bit code (MXFP4, NF4)

q is an FP8 number (e4m3), a signed 8-bit integer or an unsigned 4-bit integer. Two 4-bit numbers share a byte: byte b
of a segment of `half` bytes has column b of the segment in its low bits and column `half` + b in its high bits, so that
a kernel needs no permutation of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F


class QuantizedMatrix(NamedTuple):
    values: torch.Tensor  # [rows, columns] float8_e4m3fn or int8, or [rows, columns / 2] uint8
    scale: torch.Tensor  # [rows, groups] float32 or float16
    zeros: torch.Tensor | None  # [rows, groups] float32
    zero: int = 0
    minima: torch.Tensor | None = None  # [rows, groups] float32 or float16
    codebook: torch.Tensor | None = None  # [16] float32
    is_fp4: bool = False  # the codebook has the numbers of FP4 (e2m1)
    words: torch.Tensor | None = None  # [groups, rows] int32 of `words_of`: scales and zeros again, by groups
    quantizes_inputs: bool = False  # whether GEMMs in FP8 are allowed
    input_scale: torch.Tensor | None = None  # [1] float32, of inputs in FP8; None: a scale for each row
    batch_invariant: bool = False  # one kernel for any number of rows

    @property
    def is_4_bit(self) -> bool:
        return self.values.dtype is torch.uint8

    @property
    def num_columns(self) -> int:
        return self.values.shape[1] * (2 if self.is_4_bit else 1)

    @property
    def group(self) -> int:
        """Columns per scale."""
        return self.num_columns // self.scale.shape[1]

    @property
    def half(self) -> int:
        """Bytes of a segment; 0 if a byte has one number."""
        return half_of(self.num_columns) if self.is_4_bit else 0

    @property
    def takes_fp8_inputs(self) -> bool:
        """Whether kernels multiply it with FP8 inputs; FP8 tensor cores sum over 32 columns at least."""
        return self.values.dtype is torch.float8_e4m3fn and self.group >= 32

    @property
    def has_fp8_gemm(self) -> bool:
        return self.quantizes_inputs and not self.batch_invariant and self.takes_fp8_inputs

    @property
    def chains_fp8(self) -> bool:
        """Whether chains quantise inputs. A static scale is that of normed inputs, which chains do not have."""
        return self.has_fp8_gemm and self.input_scale is None

    @property
    def can_chain(self) -> bool:
        """Whether it may be part of a chain with some number of rows."""
        return (self.words is not None or self.chains_fp8) and not self.batch_invariant

    @property
    def has_slices(self) -> bool:
        """Whether `streaming.py` can divide it: into slices of 64 bytes of a row, each with one scale."""
        if self.is_4_bit:
            return self.words is not None and self.group == 128 == 2 * self.half
        return self.values.dtype is torch.float8_e4m3fn and self.scale.shape[1] == 1 and self.num_columns % 64 == 0

    def rows(self, first: int, count: int) -> QuantizedMatrix:
        return self.select(lambda table: table[first : first + count])

    def select(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedMatrix:
        """The rows that `choose` takes from each tensor."""
        values = self.values
        chosen = choose(values.view(torch.uint8)).view(values.dtype)  # torch indexes no FP8
        zeros, minima = (None if table is None else choose(table) for table in (self.zeros, self.minima))
        words = None if self.words is None else choose(self.words.t()).t()
        return self._replace(values=chosen, scale=choose(self.scale), zeros=zeros, minima=minima, words=words)


class QuantizedExperts(NamedTuple):
    """The matrices of several experts, one below the other."""

    matrix: QuantizedMatrix  # [experts * rows, columns]
    num_experts: int

    @property
    def num_rows(self) -> int:
        """Of one expert."""
        return len(self.matrix.values) // self.num_experts

    def expert(self, index: int) -> QuantizedMatrix:
        return self.matrix.rows(index * self.num_rows, self.num_rows)


def words_of(scale: torch.Tensor, zeros: torch.Tensor | int) -> torch.Tensor:
    """[groups, rows] int32: the first 24 bits of a float32 scale, then its zero, an integer below 128. Scales that were
    float16 or bfloat16 are exact, others are rounded."""
    bits = scale.t().float().contiguous().view(torch.int32)
    codes = zeros.t().to(torch.int32) if isinstance(zeros, torch.Tensor) else zeros
    return (bits + 128 & -256) | codes


def half_of(num_columns: int) -> int:
    """The segment length of 4-bit numbers. Columns must be a multiple of 32."""
    assert num_columns % 32 == 0, f"4-bit numbers need columns in multiples of 32, not {num_columns}"
    return next(half for half in (64, 32, 16) if num_columns % (2 * half) == 0)


def pack_4_bit(q: torch.Tensor) -> torch.Tensor:
    """q [rows, columns] uint8 of 0 to 15, to [rows, columns / 2]."""
    low, high = q.unflatten(1, (-1, 2, half_of(q.shape[1]))).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_4_bit(packed: torch.Tensor) -> torch.Tensor:
    """The opposite of `pack_4_bit`."""
    pairs = packed.unflatten(1, (-1, half_of(2 * packed.shape[1])))
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)


# GEMM with quantised weights in plain torch: the oracle of the kernels.

SEGMENT = 64  # inputs that share a scale in `quantize_segments`
MAX_INTEGER = 32512.0
MAX_FP8 = 448.0  # the largest number of float8_e4m3fn


def dequantize(weight: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, columns], computed in float32 or float64, then rounded to `dtype`."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    q = unpack_4_bit(weight.values) if weight.is_4_bit else weight.values
    numbers = q.to(wide) if weight.codebook is None else weight.codebook.to(wide)[q.int()]
    grouped = numbers.unflatten(1, (-1, weight.group))
    if weight.zero:
        grouped -= weight.zero
    if weight.zeros is not None:
        grouped -= weight.zeros.to(wide).unsqueeze(-1)
    grouped *= weight.scale.to(wide).unsqueeze(-1)
    if weight.minima is not None:
        grouped += weight.minima.to(wide).unsqueeze(-1)
    return grouped.flatten(1).to(dtype)


def quantized_linear(x: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, columns] to [T, rows]; the inputs are not quantised."""
    return F.linear(x, dequantize(weight, x.dtype), bias)


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, columns] to FP8 and a scale for each row, [T, 1] float32. `scale`: one number, for all rows."""
    wide = x.float()
    if scale is None:
        scales = (wide.abs().amax(1, keepdim=True) / MAX_FP8).clamp_min(1e-12)
    else:
        scales = scale.reshape(1, 1).expand(len(x), 1)
    # a multiplication by the reciprocal, as in the kernel
    return (wide * (1 / scales)).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn), scales


def scaled_linear(
    x: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None = None, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """As `quantized_linear` with the inputs quantised to FP8, a scale for each row."""
    q, scales = quantize_rows(x, input_scale)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = F.linear(q.to(wide), dequantize(weight, wide)) * scales.to(wide)
    return (out if bias is None else out + bias).to(x.dtype)


def quantize_segments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [columns] as integers of 16 bits, as `row.py` computes them: high and low bytes
    [columns / 64, 64] int8 and scales [columns / 64] float32; x = scale * (256 * high + low)."""
    segments = x.float().unflatten(0, (-1, SEGMENT))
    largest = segments.abs().amax(1).clamp_min(1e-30)
    factor = (MAX_INTEGER / largest).double().unsqueeze(1)  # a product in float64 is exact, as it is in an FMA
    integers = (segments.double() * factor).round().to(torch.int32)
    high = integers + 128 >> 8
    return high.to(torch.int8), (integers - 256 * high).to(torch.int8), largest / MAX_INTEGER


def integer_linear(x: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    """x [1, columns] times 4-bit weights with words, [1, rows] float64, by the integer sums of `row.py`.
    Integers are exact; what differs is float32, in which the kernel adds the sums of groups."""
    assert weight.words is not None and weight.group == 2 * SEGMENT
    high, low, scales = (part.unflatten(0, (-1, 2)) for part in quantize_segments(x[0]))  # of low bits, of high bits
    packed = weight.values.unflatten(1, (-1, SEGMENT))  # [rows, groups, 64]
    operands = torch.stack((packed & 15, (packed ^ 0x80) & 0xF0), 2).view(torch.int8).long()
    even, odd = ((operands * part.long()).sum(3) for part in (high, low))  # [rows, groups, 2]
    zeros = (weight.words & 255).t().unsqueeze(2).long()
    sums = (256 * high.long() + low.long()).sum(2)
    odd += torch.cat((-zeros * sums[:, :1], 16 * (8 - zeros) * sums[:, 1:]), 2)
    value = 256 * even + odd
    assert value.abs().max() < 2**31, "a sum does not fit 32 bits"
    factors = weight.words.view(torch.float32).t().double().unsqueeze(2) * scales.double()
    return (value.double() * factors * factors.new_tensor((1, 1 / 16))).sum((1, 2)).unsqueeze(0)


# LayerGemms: the GEMMs from one attention to the next, and whether one kernel has their sizes (`layer.py`).

PROGRAMS = 128  # that run at once, one per multiprocessor
SPLITS = 2  # split-k of o and down: each program has one block of 64 outputs
MAX_IDLE = 0.1  # share of the programs that are idle in the last turn of gate and up


class LayerGemms(NamedTuple):
    """The GEMMs in their order, and the norms before the second and the fourth. After the last attention there is no
    fourth, and its norm is that of the hidden states."""

    o: QuantizedMatrix
    gate_up: QuantizedMatrix
    down: QuantizedMatrix
    next_qkv: QuantizedMatrix | None
    feed_norm: torch.Tensor
    feed_eps: float
    next_norm: torch.Tensor
    next_eps: float

    @property
    def fits(self) -> bool:
        """Whether the kernel has the sizes. It was measured with those of Qwen3-8B: others would need other splits, or
        leave programs idle."""
        hidden, feed = len(self.o.values), len(self.gate_up.values) // 2
        if hidden * SPLITS != 64 * PROGRAMS or len(self.down.values) != hidden:
            return False
        if self.next_qkv is not None and len(self.next_qkv.values) % 64:
            return False
        turns = -(-feed // (32 * PROGRAMS))
        is_busy = feed >= (1 - MAX_IDLE) * turns * 32 * PROGRAMS
        parts = (self.o.num_columns / SPLITS, feed / SPLITS)
        return is_busy and all(part % 1024 == 0 and part <= 8192 for part in parts)

    @property
    def are_fp8(self) -> bool:
        """Whether all weights are FP8 with a scale per row, as TMA loads them."""
        return all(
            weight.takes_fp8_inputs
            and weight.scale.shape[1] == 1
            and weight.values.is_contiguous()
            and weight.scale.is_contiguous()
            and weight.values.data_ptr() % 16 == 0
            for weight in self[:4]
            if weight is not None
        )
