"""GEMV with quantised weights, for 1 or 2 rows: bandwidth-bound, so a program loads weights before its input is ready.

Numbers are expanded to float32 in registers. The shape alone fixes the order of every sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.linear.triton.epilogue import GATES, store_epilogue, weight_rows
from slipstream.ops.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.quantized.matrix import QuantizedMatrix


def quantized_gemv(
    x: torch.Tensor,  # [rows, in]
    weight: QuantizedMatrix,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None = None,
    gate: str = "",
    tile: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """`tile`: outputs and bytes of a program's step, and its warps."""
    rows, num_in = x.shape
    num_rows = len(weight.values)
    num_out = num_rows // 2 if gate else num_rows
    assert x.stride(1) == 1, "rows of x must be contiguous"
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    num_bytes = weight.values.shape[1]
    outputs, step, warps = tile or _tile(num_bytes, gate)
    segment = _segment(weight)
    _gemv_kernel[(triton.cdiv(num_rows, outputs),)](
        x,
        weight.values,
        weight.scale,
        weight.offset,
        bias,
        out,
        num_out,
        x.stride(0),
        ROWS=rows,
        PADDED=triton.next_power_of_2(rows),
        BYTES=num_bytes,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[1],
        HALF=weight.half,
        ZERO=weight.zero,
        SCALED=weight.scale.shape[1] > 1 or weight.offset is not None or weight.is_4_bit,
        GATE=GATES[gate],
        BLOCK_OUT=outputs,
        SEGMENTS=max(step // segment, 1),
        SEGMENT=segment,
        num_warps=warps,
        **dependent(x.device, rows),
    )
    return out


def _tile(num_bytes: int, gate: str) -> tuple[int, int, int]:
    if num_bytes <= 1024:
        return 4, 1024, 4
    return (2, 2048, 4) if num_bytes <= 8192 or gate else (1, 2048, 4)


def _segment(weight: QuantizedMatrix) -> int:
    """Bytes whose numbers have one scale, or one scale for their low and one for their high bits."""
    if weight.is_4_bit:
        return min(weight.half, weight.group)
    return min(weight.group & -weight.group, 128)  # a power of two


# grid: (blocks of outputs,)
@triton.jit
def _gemv_kernel(
    x,
    values,
    scale,
    offset,
    bias,
    out,
    num_out,
    x_stride,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    ZERO: tl.constexpr,
    SCALED: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    STEP: tl.constexpr = SEGMENTS * SEGMENT
    # three dimensions: outputs, segments, bytes of a segment
    source, inside = weight_rows(tl.program_id(0), num_out, GATE, BLOCK_OUT)
    source = source.to(tl.int64)[:, None, None]
    inside = inside[:, None, None]
    segment = tl.arange(0, SEGMENTS)[None, :, None]
    at = segment * SEGMENT + tl.arange(0, SEGMENT)[None, None, :]
    start = values + source * BYTES + at
    # weights are loaded one block ahead, the first block before x is ready
    q = tl.load(start, mask=inside & (at < BYTES), other=0.0, eviction_policy="evict_first")
    wait_for_previous(DEPENDENT)
    sums0 = tl.zeros((BLOCK_OUT, SEGMENTS, SEGMENT), tl.float32)
    sums1 = tl.zeros((BLOCK_OUT, SEGMENTS, SEGMENT), tl.float32)
    for first in range(0, BYTES, STEP):
        following = q
        if BYTES > STEP:
            ahead = first + STEP
            following = tl.load(
                start + ahead, mask=inside & (ahead + at < BYTES), other=0.0, eviction_policy="evict_first"
            )
        there = first + at < BYTES
        begin = first + segment * SEGMENT  # the first byte of a segment
        if HALF:
            low_column = begin // HALF * (2 * HALF) + begin % HALF
            low = (q & 15).to(tl.float32) - ZERO
            high = (q >> 4).to(tl.float32) - ZERO
            column = low_column + tl.arange(0, SEGMENT)[None, None, :]
            low = _scaled(low, scale, offset, source, low_column // GROUP, inside & (begin < BYTES), GROUPS)
            high = _scaled(high, scale, offset, source, (low_column + HALF) // GROUP, inside & (begin < BYTES), GROUPS)
            sums0 += low * tl.load(x + column, mask=there, other=0.0).to(tl.float32)
            sums0 += high * tl.load(x + column + HALF, mask=there, other=0.0).to(tl.float32)
            if ROWS == 2:
                sums1 += low * tl.load(x + x_stride + column, mask=there, other=0.0).to(tl.float32)
                sums1 += high * tl.load(x + x_stride + column + HALF, mask=there, other=0.0).to(tl.float32)
        else:
            w = q.to(tl.float32) - ZERO
            if SCALED:
                w = _scaled(w, scale, offset, source, begin // GROUP, inside & (begin < BYTES), GROUPS)
            sums0 += w * tl.load(x + first + at, mask=there, other=0.0).to(tl.float32)
            if ROWS == 2:
                sums1 += w * tl.load(x + x_stride + first + at, mask=there, other=0.0).to(tl.float32)
        q = following
    result = tl.sum(tl.sum(sums0, 2), 1)[None, :]
    row = tl.arange(0, PADDED)
    if ROWS == 2:
        second = tl.sum(tl.sum(sums1, 2), 1)[None, :]
        result = tl.where(row[:, None] == 0, result, second)
    if not SCALED:  # one scale for each output
        own, valid = weight_rows(tl.program_id(0), num_out, GATE, BLOCK_OUT)
        result *= tl.load(scale + own, mask=valid, other=0.0)[None, :]
    store_epilogue(result, row, row < ROWS, bias, out, tl.program_id(0), num_out, GATE, PADDED, BLOCK_OUT)


@triton.jit
def _scaled(q, scale, offset, source, group, mask, GROUPS: tl.constexpr):
    """q * scale - offset; `group` and `mask` have no bytes dimension."""
    where = source * GROUPS + group
    w = q * tl.load(scale + where, mask=mask, other=0.0)
    if offset is not None:
        w -= tl.load(offset + where, mask=mask, other=0.0)
    return w
