"""GEMV with quantised weights, for 1 or 2 rows: bandwidth-bound, so a program loads weights before its input is ready.

Numbers are expanded to float32 in registers. A thread loads 8 bytes of a weight row and the inputs for them, and sums
their products before it applies a scale, so sums need few registers. The shape alone fixes the order of every sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream.ops.linear.triton.epilogue import GATES, store_epilogue, weight_rows
from slipstream.ops.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.quantized.matrix import QuantizedMatrix


class QuantizedGemvTile(NamedTuple):
    outputs: int  # weight rows per program
    bytes: int  # of a weight row per load
    warps: int


def quantized_gemv(
    x: torch.Tensor,  # [rows, in]
    weight: QuantizedMatrix,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None = None,
    gate: str = "",
    tile: QuantizedGemvTile | None = None,
) -> torch.Tensor:
    rows = len(x)
    num_rows, num_bytes = weight.values.shape
    num_out = num_rows // 2 if gate else num_rows
    assert x.stride(1) == 1, "rows of x must be contiguous"
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    tile = tile or gemv_tile(num_bytes)
    segment = _segment(weight)
    _gemv_kernel[(triton.cdiv(num_rows, tile.outputs),)](
        x,
        weight.values,
        weight.scale,
        weight.zeros,
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
        GATE=GATES[gate],
        BLOCK_OUT=tile.outputs,
        SEGMENTS=max(tile.bytes // segment, 1),
        SEGMENT=segment,
        STEPS=triton.cdiv(num_bytes, max(tile.bytes // segment, 1) * segment),
        num_warps=tile.warps,
        **dependent(x.device, rows),
    )
    return out


def gemv_tile(num_bytes: int) -> QuantizedGemvTile:
    """Few warps, each with a long part of a row, so that few sums cross threads; a thread loads 128 bytes."""
    width = min(triton.next_power_of_2(num_bytes), 4096)
    if width > 1024 and num_bytes % width:
        width //= 2
    return QuantizedGemvTile(4, width, max(1, width // 1024))


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
    zeros,
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
    GATE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    STEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    STEP: tl.constexpr = SEGMENTS * SEGMENT
    CHUNK: tl.constexpr = 8
    BASE: tl.constexpr = 128 if HALF else 0  # `_float_bits` adds it to 4-bit numbers
    # four dimensions: outputs, segments, chunks of a segment, bytes of a chunk
    source, inside = weight_rows(tl.program_id(0), num_out, GATE, BLOCK_OUT)
    source = source.to(tl.int64)
    segment = tl.arange(0, SEGMENTS)
    chunk = tl.arange(0, SEGMENT // CHUNK) * CHUNK
    in_segment = chunk[None, None, :, None] + tl.arange(0, CHUNK)[None, None, None, :]
    at = (segment * SEGMENT)[None, :, None, None] + in_segment
    start = values + (source * BYTES)[:, None, None, None] + at
    there = inside[:, None, None, None]
    # the first weights are loaded before x is ready
    q = tl.load(start, mask=there & (at < BYTES), other=0.0, eviction_policy="evict_first")
    wait_for_previous(DEPENDENT)
    sums0 = tl.zeros((BLOCK_OUT, SEGMENTS, SEGMENT // CHUNK), tl.float32)
    sums1 = tl.zeros((BLOCK_OUT, SEGMENTS, SEGMENT // CHUNK), tl.float32)
    table = (source * GROUPS)[:, None]
    # unrolled, not a loop that carries weights: a carried byte takes a whole register
    for number in tl.static_range(STEPS):
        first = number * STEP
        begin = first + segment * SEGMENT  # the first byte of a segment
        mask = first + at < BYTES
        held = inside[:, None] & (begin < BYTES)[None, :]
        if number > 0:
            q = tl.load(start + first, mask=there & mask, other=0.0, eviction_policy="evict_first")
        if HALF:
            low = begin // HALF * (2 * HALF) + begin % HALF  # column
            column = low[None, :, None, None] + in_segment
            of_low = _float_bits(q.to(tl.int32) << 16)
            of_high = _float_bits(q.to(tl.int32) << 12)
            group = table + (low // GROUP)[None, :]
            high_group = group
            if GROUP < 2 * HALF:
                high_group = table + ((low + HALF) // GROUP)[None, :]
            inputs = x + column
            for row in tl.static_range(ROWS):
                part, total = _products(of_low, inputs, mask)
                other, other_total = _products(of_high, inputs + HALF, mask)
                if GROUP < 2 * HALF:
                    part = _scaled(part, total, scale, zeros, group, held, ZERO, BASE, GROUPS)
                    part += _scaled(other, other_total, scale, zeros, high_group, held, ZERO, BASE, GROUPS)
                else:
                    part, total = part + other, total + other_total
                    part = _scaled(part, total, scale, zeros, group, held, ZERO, BASE, GROUPS)
                if row == 0:
                    sums0 += part
                else:
                    sums1 += part
                inputs += x_stride
        else:
            w = q.to(tl.float32)
            group = table + (begin // GROUP)[None, :]
            inputs = x + first + at
            for row in tl.static_range(ROWS):
                part, total = _products(w, inputs, mask)
                part = _scaled(part, total, scale, zeros, group, held, ZERO, BASE, GROUPS)
                if row == 0:
                    sums0 += part
                else:
                    sums1 += part
                inputs += x_stride
    # segments first: most of them belong to one thread
    result = tl.sum(tl.sum(sums0, 1), 1)[None, :]
    row = tl.arange(0, PADDED)
    if ROWS == 2:
        second = tl.sum(tl.sum(sums1, 1), 1)[None, :]
        result = tl.where(row[:, None] == 0, result, second)
    if GROUPS == 1:
        own, valid = weight_rows(tl.program_id(0), num_out, GATE, BLOCK_OUT)
        result *= tl.load(scale + own, mask=valid, other=0.0)[None, :]
    store_epilogue(result, row, row < ROWS, bias, out, tl.program_id(0), num_out, GATE, PADDED, BLOCK_OUT)


@triton.jit
def _products(w, inputs, mask):
    """Sums of w * x and of x, by chunk."""
    value = tl.load(inputs, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(w * value, 3), tl.sum(value, 3)


@triton.jit
def _scaled(part, total, scale, zeros, group, held, ZERO: tl.constexpr, BASE: tl.constexpr, GROUPS: tl.constexpr):
    """scale * (part - zero * total), by chunk. `group`, `held`: [outputs, segments]."""
    if zeros is not None:
        part -= (tl.load(zeros + group, mask=held, other=0.0) + BASE)[:, :, None] * total
    elif ZERO + BASE:
        part -= (ZERO + BASE) * total
    if GROUPS > 1:
        part *= tl.load(scale + group, mask=held, other=0.0)[:, :, None]
    return part


@triton.jit
def _float_bits(q):
    """128 + the 4-bit number in bits 16 to 19, in float32: its bits below those of 128, which is exact and needs no
    conversion."""
    return (q & 0xF0000 | 0x43000000).to(tl.float32, bitcast=True)
