"""Shared by the Triton GEMMs with quantised weights: numbers of one step become an operand of the tensor cores.

The launcher chooses what a scale multiplies (`scaling_of`): each number, the sums of a group, or the sums of a row. A
step of 4-bit numbers has two halves, the low and the high bits of its bytes (`ops/gemm/quantized/matrix.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.quantized.matrix import QuantizedMatrix

EACH, GROUP_SUMS, ROW_SUMS = 0, 1, 2  # what a scale multiplies
_EACH, _GROUP_SUMS, _ROW_SUMS = tl.constexpr(EACH), tl.constexpr(GROUP_SUMS), tl.constexpr(ROW_SUMS)

# Four bytes of two 4-bit numbers each, and the bfloat16 -128 - zero of low and of high numbers, to 4 + 4 numbers
# less their zeros. 4 bits below those of 128 are the bfloat16 128 + q; every step is exact.
BFLOAT16_OF_4_BITS = tl.constexpr("""{
.reg .b32 a, b, c, d, one, mask, base;
mov.b32 mask, 0x000f000f;
mov.b32 base, 0x43004300;
mov.b32 one, 0x3f803f80;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, mask, base, 0xea;
lop3.b32 b, b, mask, base, 0xea;
lop3.b32 c, c, mask, base, 0xea;
lop3.b32 d, d, mask, base, 0xea;
fma.rn.bf16x2 a, a, one, $5;
fma.rn.bf16x2 b, b, one, $6;
fma.rn.bf16x2 c, c, one, $7;
fma.rn.bf16x2 d, d, one, $8;
mov.b32 $0, a;
mov.b32 $1, b;
mov.b32 $2, c;
mov.b32 $3, d;
}""")


# Four FP8 numbers (e4m3) to four bfloat16. The bits of an e4m3 number, shifted, are those of a bfloat16 whose exponent
# is 120 less; the multiplication by 2**120, with the sign, is exact, also for subnormal numbers. NaN becomes 480.
BFLOAT16_OF_FP8 = tl.constexpr("""{
.reg .b32 a, b, c, d, s, t;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 s, a, 0x80008000, 0x7b807b80, 0xea;
lop3.b32 t, b, 0x80008000, 0x7b807b80, 0xea;
mul.rn.bf16x2 $0, c, s;
mul.rn.bf16x2 $1, d, t;
}""")


def step_of(weight: QuantizedMatrix, num_bytes: int, has_fp8_inputs: bool) -> int:
    """Bytes of a weight row per step; `num_bytes`: wanted, for weights of 8 bits. With FP8 inputs the weights stay FP8,
    so that scales must multiply sums: a step lies within a group."""
    if has_fp8_inputs and weight.scale.shape[1] > 1:
        return min(num_bytes, weight.group)
    if not weight.is_4_bit:
        return num_bytes
    # a segment of 4-bit numbers if it lies within a group: then scales multiply sums
    return weight.half if weight.half == 64 and weight.group >= 64 else 64


def scaling_of(weight: QuantizedMatrix, step: int) -> int:
    if weight.minima is not None:
        return EACH
    if weight.scale.shape[1] == 1:
        return ROW_SUMS
    return GROUP_SUMS if min(weight.group, weight.half or step) == step else EACH


def constants_of(weight: QuantizedMatrix, step: int, x: torch.Tensor) -> dict[str, Any]:
    """Arguments of a kernel that multiplies the weight with inputs x."""
    num_bytes = weight.values.shape[1]
    is_integer = weight.is_4_bit and weight.codebook is None
    return dict(
        BYTES=num_bytes,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[1],
        HALF=weight.half,
        ZERO=weight.zero,
        STEP=step,
        RUN=min(weight.group, weight.half or step),
        SCALING=scaling_of(weight, step),
        EVEN=num_bytes % step == 0,
        FP4=weight.is_fp4,
        # the interpreter has no PTX
        PTX=is_integer and x.is_cuda and x.dtype is torch.bfloat16,
    )


@triton.jit
def first_columns(STEP: tl.constexpr, HALF: tl.constexpr):
    """The column of each byte of a step, or of its low bits, relative to the step's first column."""
    k = tl.arange(0, STEP)
    if HALF and HALF < STEP:
        return tl.max_contiguous(tl.multiple_of(k + k // HALF * HALF, HALF), HALF)
    else:
        return k


@triton.jit
def load_numbers(weights, first, STEP: tl.constexpr, BYTES: tl.constexpr, EVEN: tl.constexpr):
    """Bytes [outputs, STEP] from byte `first` of the rows; 0 after their end."""
    if EVEN:
        return tl.load(weights + first)
    else:
        return tl.load(weights + first, mask=(first + tl.arange(0, STEP))[None, :] < BYTES, other=0.0)


@triton.jit
def load_inputs(inputs, first, offset, there, STEP: tl.constexpr, BYTES: tl.constexpr, EVEN: tl.constexpr):
    """Inputs [STEP, rows] of the bytes from `first` on, `offset` columns after `inputs`; 0 after the last column."""
    if EVEN:
        return tl.load(inputs + offset, mask=there, other=0.0)
    else:
        return tl.load(inputs + offset, mask=there & ((first + tl.arange(0, STEP))[:, None] < BYTES), other=0.0)


@triton.jit
def load_factor(scale, row, column, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALING: tl.constexpr):
    """The scales [outputs, 1] that multiply the sums of a step from `column` on; 1 if they multiply something else.

    The compiler fetches ahead what a GEMM multiplies, and not these: a loop loads those of its next step, so that no
    step waits for them.
    """
    if SCALING == _GROUP_SUMS:
        entry = column // GROUP
        return tl.load(scale + row + entry, mask=entry < GROUPS, other=0.0).to(tl.float32)
    else:
        return 1.0


@triton.jit
def add_halves(
    total,
    q,
    low,
    high,
    row,
    column,
    factor,
    next_factor,
    scale,
    zeros,
    minima,
    codebook,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    SCALING: tl.constexpr,
    FP4: tl.constexpr,
    PTX: tl.constexpr,
):
    """`add_step` for both halves of 4-bit numbers, with inputs `low` and `high`. `next_factor`: of the high half."""
    if PTX and SCALING != _EACH:
        entry, next_entry = row + column // GROUP, row + (column + HALF) // GROUP
        if zeros is None:
            first_zero = tl.full((q.shape[0], 1), -(ZERO + 128.0), tl.bfloat16)
            next_zero = first_zero
        else:
            first_zero = (-128.0 - tl.load(zeros + entry)).to(tl.bfloat16)
            next_zero = first_zero
            if GROUP < 2 * HALF:
                next_zero = (-128.0 - tl.load(zeros + next_entry)).to(tl.bfloat16)
        first_zero, next_zero = tl.broadcast_to(first_zero, q.shape), tl.broadcast_to(next_zero, q.shape)
        one, other = tl.inline_asm_elementwise(
            BFLOAT16_OF_4_BITS,
            "=r,=r,=r,=r,r,r,r,r,r",
            [q, first_zero, next_zero],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        if SCALING == _ROW_SUMS:
            return tl.dot(other, high, tl.dot(one, low, total))
        elif GROUP >= 2 * HALF:
            return total + tl.dot(other, high, tl.dot(one, low)) * factor
        else:
            total += tl.dot(one, low) * factor
            return total + tl.dot(other, high) * next_factor
    else:
        total = add_step(
            total, q & 15, low, row, column, factor, scale, zeros, minima, codebook,
            ZERO, GROUP, GROUPS, HALF, RUN, STEP, SCALING, FP4,
        )  # fmt: skip
        return add_step(
            total, q >> 4, high, row, column + HALF, next_factor, scale, zeros, minima, codebook,
            ZERO, GROUP, GROUPS, HALF, RUN, STEP, SCALING, FP4,
        )  # fmt: skip


@triton.jit
def add_step(
    total,
    q,
    x,
    row,
    column,
    factor,
    scale,
    zeros,
    minima,
    codebook,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    SCALING: tl.constexpr,
    FP4: tl.constexpr,
):
    """total [outputs, rows] after the numbers q [outputs, STEP] and inputs x [STEP, rows].

    `row` [outputs, 1]: index of each output's first entry in the tables; `column`: of the first number; `factor`: of
    `load_factor`; RUN: adjacent columns of a step that share a scale.
    """
    if SCALING == _EACH:
        w = number_of(q, row, column, scale, zeros, minima, codebook, ZERO, GROUP, GROUPS, HALF, RUN, STEP, FP4)
        return tl.dot(w.to(x.dtype), x, total, input_precision="ieee")
    else:
        entry = row + column // GROUP
        if codebook is not None:
            w = _look_up(codebook, q, FP4)
        elif q.dtype == x.dtype:
            w = q
        else:
            w = q.to(x.dtype)
            if zeros is not None:
                w = w - tl.load(zeros + entry).to(x.dtype)
            elif ZERO:
                w = w - ZERO
        if SCALING == _ROW_SUMS:
            return tl.dot(w.to(x.dtype), x, total, input_precision="ieee")
        else:
            sums = tl.dot(w.to(x.dtype), x, input_precision="ieee")
            return total + sums * factor


@triton.jit
def number_of(
    q,
    row,
    column,
    scale,
    zeros,
    minima,
    codebook,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    FP4: tl.constexpr,
):
    """The weights of numbers q [outputs, STEP], in float32; other arguments as in `add_step`."""
    w = q.to(tl.float32) if codebook is None else _look_up(codebook, q, FP4)
    if zeros is not None:
        w = w - _spread(zeros, row, column, GROUP, GROUPS, HALF, RUN, STEP)
    elif ZERO:
        w = w - ZERO
    w = w * _spread(scale, row, column, GROUP, GROUPS, HALF, RUN, STEP)
    if minima is not None:
        w = w + _spread(minima, row, column, GROUP, GROUPS, HALF, RUN, STEP)
    return w


@triton.jit
def _look_up(codebook, q, FP4: tl.constexpr):
    """The numbers of 4-bit codes, in float32. Loads by code would go through shared memory, one number at a time."""
    if FP4:
        # exponent and mantissa bits in place of those of a float32, whose exponent is 126 less
        bits = (q & 7).to(tl.int32) << 22 | (q & 8).to(tl.int32) << 28
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    else:
        first, second, third = (q & 1) != 0, (q & 2) != 0, (q & 4) != 0
        low = _choose_of_8(codebook, first, second, third)
        return tl.where((q & 8) != 0, _choose_of_8(codebook + 8, first, second, third), low)


@triton.jit
def _choose_of_8(table, first, second, third):
    a = tl.where(first, tl.load(table + 1), tl.load(table))
    b = tl.where(first, tl.load(table + 3), tl.load(table + 2))
    c = tl.where(first, tl.load(table + 5), tl.load(table + 4))
    d = tl.where(first, tl.load(table + 7), tl.load(table + 6))
    return tl.where(third, tl.where(second, d, c), tl.where(second, b, a))


@triton.jit
def _spread(
    table,
    row,
    column,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
):
    """The entry of each number of a step in a table, [outputs, STEP] float32."""
    NUM: tl.constexpr = STEP // RUN
    first = tl.arange(0, NUM) * RUN
    if HALF and HALF < STEP:
        first += first // HALF * HALF
    entry = ((column + first) // GROUP)[None, :]
    # the last step of a row may reach past its groups, and past the table
    found = tl.load(table + row + entry, mask=entry < GROUPS, other=0.0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(found[:, :, None], (found.shape[0], NUM, RUN)), (found.shape[0], STEP))


# Dequantises a whole weight on a GPU, for GEMMs of many rows by the kernels for unquantised weights.

STEP = 128  # bytes of a row per program
ROWS = 32


def dequantize(weight: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """As the reference."""
    num_rows, num_bytes = weight.values.shape
    out = torch.empty((num_rows, weight.num_columns), dtype=dtype, device=weight.values.device)
    constants = constants_of(weight, STEP, out)
    for name in ("SCALING", "PTX"):
        del constants[name]
    _dequantize_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_bytes, STEP))](
        weight.values,
        weight.scale,
        weight.zeros,
        weight.minima,
        weight.codebook,
        out,
        num_rows,
        ROWS=ROWS,
        **constants,
        num_warps=4,
    )
    return out


# grid: (blocks of rows, steps of a row)
@triton.jit
def _dequantize_kernel(
    values,
    scale,
    zeros,
    minima,
    codebook,
    out,
    num_rows,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    ZERO: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
    FP4: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None]
    source = tl.where(row < num_rows, row, 0).to(tl.int64)[:, None]
    first = tl.program_id(1) * STEP
    q = load_numbers(values + source * BYTES + tl.arange(0, STEP)[None, :], first, STEP, BYTES, EVEN)
    if not EVEN:
        mask = mask & ((first + tl.arange(0, STEP)) < BYTES)[None, :]
    table = source * GROUPS
    if HALF:
        column = 2 * first
        target = out + source * (2 * BYTES) + column + first_columns(STEP, HALF)[None, :]
        low = number_of(
            q & 15, table, column, scale, zeros, minima, codebook, ZERO, GROUP, GROUPS, HALF, RUN, STEP, FP4
        )
        tl.store(target, low.to(out.dtype.element_ty), mask=mask)
        high = number_of(
            q >> 4, table, column + HALF, scale, zeros, minima, codebook, ZERO, GROUP, GROUPS, HALF, RUN, STEP, FP4
        )
        tl.store(target + HALF, high.to(out.dtype.element_ty), mask=mask)
    else:
        number = number_of(q, table, first, scale, zeros, minima, codebook, ZERO, GROUP, GROUPS, HALF, RUN, STEP, FP4)
        target = out + source * BYTES + first + tl.arange(0, STEP)[None, :]
        tl.store(target, number.to(out.dtype.element_ty), mask=mask)
