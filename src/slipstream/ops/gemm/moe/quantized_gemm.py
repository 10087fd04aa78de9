"""Grouped GEMMs of quantised experts on CUDA, over the tiles of `sort.py`.

A tile streams the quantised weights of its expert only; they are expanded in registers, or multiplied as FP8 with FP8
inputs. The weights are the left operand, as in `ops/gemm/quantized/gemm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.moe.reference import Gate, Routing
from slipstream.ops.gemm.moe.sort import GATES, ExpertTiles, GroupedTile, pairs_of, store_pairs
from slipstream.ops.gemm.quantized.expand import (
    ROW_SUMS,
    add_halves,
    add_step,
    constants_of,
    first_columns,
    load_factor,
    load_inputs,
    load_numbers,
    step_of,
)
from slipstream.ops.gemm.quantized.gemm import quantize_rows
from slipstream.ops.gemm.quantized.matrix import QuantizedExperts
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

_ROW_SUMS = tl.constexpr(ROW_SUMS)


def multiply_quantized(
    x: torch.Tensor,
    experts: QuantizedExperts,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    tiles: ExpertTiles | None,
    tile: GroupedTile,
    gate: Gate | None,
    batch_invariant: bool,
) -> None:
    """As `multiply` of `gemm.py`."""
    weight, x_scale = experts.matrix, None
    if weight.has_fp8_gemm and not batch_invariant:
        x, x_scale = quantize_rows(x, weight.input_scale)
    num_out = out.shape[1]
    assert x.stride(1) == 1 and x.shape[1] == weight.num_columns, "inputs do not fit the weights"
    order, table = (None, routing.ids) if tiles is None else (tiles.order, tiles.table)
    num_tiles = table.shape[1]
    step = step_of(weight, tile.inputs, x_scale is not None)
    _quantized_grouped_kernel[(num_tiles, triton.cdiv(num_out, tile.outputs))](
        x,
        x_scale,
        weight.values,
        weight.scale,
        weight.zeros,
        weight.minima,
        weight.codebook,
        bias,
        out,
        order,
        table,
        None if gate else routing.weights,
        num_out,
        num_tiles,
        experts.num_experts,
        x.stride(0),
        TOP_K=routing.ids.shape[1],
        INWARD=gate is not None,
        GATED=gate not in (None, "relu2"),
        GATE=GATES.index(gate or "silu"),
        PAIRS=tile.pairs,
        OUTPUTS=tile.outputs,
        **constants_of(weight, step, x),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x.device, len(routing.ids)),
    )


# grid: (tiles, blocks of outputs)
@triton.jit
def _quantized_grouped_kernel(
    x,
    x_scale,
    values,
    scale,
    zeros,
    minima,
    codebook,
    bias,
    out,
    order,
    table,
    pair_weights,
    num_out,
    num_tiles,
    num_experts,
    x_stride,
    TOP_K: tl.constexpr,
    INWARD: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    ZERO: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    SCALING: tl.constexpr,
    EVEN: tl.constexpr,
    FP4: tl.constexpr,
    PTX: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    tile = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    expert = tl.load(table + tile)
    if (expert < 0) | (expert >= num_experts):
        return
    index, there, pair = pairs_of(tile, order, table, num_tiles, PAIRS)
    source = tl.where(there, pair // TOP_K if INWARD else index, 0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows_per_expert = 2 * num_out if GATED else num_out
    own = expert.to(tl.int64) * rows_per_expert + tl.where(output < num_out, output, 0)
    below = num_out.to(tl.int64)  # from a gate row to its up row
    weights = values + own[:, None] * BYTES + tl.arange(0, STEP)[None, :]
    entry = own[:, None] * GROUPS
    inputs = x + source.to(tl.int64)[None, :] * x_stride + first_columns(STEP, HALF)[:, None]
    mask = there[None, :]
    total = tl.zeros((OUTPUTS, PAIRS), tl.float32)
    ups = tl.zeros((OUTPUTS, PAIRS), tl.float32)
    COLUMNS: tl.constexpr = 2 * STEP if HALF else STEP  # of a step
    IS_SPLIT: tl.constexpr = HALF > 0 and GROUP < 2 * HALF  # the halves of a step have scales of their own
    up_entry = entry + below * GROUPS
    ahead = load_factor(scale, entry, 0, GROUP, GROUPS, SCALING)
    ahead_high = load_factor(scale, entry, HALF, GROUP, GROUPS, SCALING) if IS_SPLIT else ahead
    ahead_up = load_factor(scale, up_entry, 0, GROUP, GROUPS, SCALING) if GATED else ahead
    ahead_up_high = load_factor(scale, up_entry, HALF, GROUP, GROUPS, SCALING) if GATED and IS_SPLIT else ahead_up
    for first in range(0, BYTES, STEP):
        factor, factor_high, up_factor, up_factor_high = ahead, ahead_high, ahead_up, ahead_up_high
        next_column = first // STEP * COLUMNS + COLUMNS
        ahead = load_factor(scale, entry, next_column, GROUP, GROUPS, SCALING)
        ahead_high = load_factor(scale, entry, next_column + HALF, GROUP, GROUPS, SCALING) if IS_SPLIT else ahead
        if GATED:
            ahead_up = load_factor(scale, up_entry, next_column, GROUP, GROUPS, SCALING)
            ahead_up_high = (
                load_factor(scale, up_entry, next_column + HALF, GROUP, GROUPS, SCALING) if IS_SPLIT else ahead_up
            )
        q = load_numbers(weights, first, STEP, BYTES, EVEN)
        if HALF:
            column = 2 * first
            low = load_inputs(inputs, first, column, mask, STEP, BYTES, EVEN)
            high = load_inputs(inputs, first, column + HALF, mask, STEP, BYTES, EVEN)
            total = add_halves(
                total, q, low, high, entry, column, factor, factor_high, scale, zeros, minima, codebook,
                ZERO, GROUP, GROUPS, HALF, RUN, STEP, SCALING, FP4, PTX,
            )  # fmt: skip
            if GATED:
                q = load_numbers(weights + below * BYTES, first, STEP, BYTES, EVEN)
                ups = add_halves(
                    ups, q, low, high, up_entry, column, up_factor, up_factor_high, scale, zeros, minima, codebook,
                    ZERO, GROUP, GROUPS, HALF, RUN, STEP, SCALING, FP4, PTX,
                )  # fmt: skip
        else:
            part = load_inputs(inputs, first, first, mask, STEP, BYTES, EVEN)
            total = add_step(
                total, q, part, entry, first, factor, scale, zeros, minima, codebook,
                ZERO, GROUP, GROUPS, HALF, RUN, STEP, SCALING, FP4,
            )  # fmt: skip
            if GATED:
                q = load_numbers(weights + below * BYTES, first, STEP, BYTES, EVEN)
                ups = add_step(
                    ups, q, part, up_entry, first, up_factor, scale, zeros, minima, codebook,
                    ZERO, GROUP, GROUPS, HALF, RUN, STEP, SCALING, FP4,
                )  # fmt: skip
    if SCALING == _ROW_SUMS:
        total *= tl.load(scale + own).to(tl.float32)[:, None]
        if GATED:
            ups *= tl.load(scale + own + below).to(tl.float32)[:, None]
    if x_scale is not None:
        factors = tl.load(x_scale + source)[None, :]
        total *= factors
        ups *= factors
    sums, pairs = (tl.trans(total), tl.trans(ups)), (index, there, pair)
    store_pairs(sums, pairs, output, expert, bias, (pair_weights, None), out, num_out, INWARD, GATED, GATE)
