"""Shared by the grouped GEMM kernels: the pairs of a tile, and the epilogue (bias, gate, weights of pairs, store)."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.ops.moe.reference import CLAMP_ALPHA, CLAMP_LIMIT, Gate

GATES: tuple[Gate, ...] = ("silu", "gelu_tanh", "clamped_swiglu", "relu2")  # kernels use the index
ALPHA, LIMIT = tl.constexpr(CLAMP_ALPHA), tl.constexpr(CLAMP_LIMIT)


@triton.jit
def pairs_of(tile, order, table, num_tiles, PAIRS: tl.constexpr):
    """Sorted indices of a tile's pairs, whether each exists, and the pairs. `order` None: one token, whose pairs are
    not sorted. A tile below 0 has none."""
    if order is None:
        index = tile + tl.arange(0, PAIRS)
        return index, index == tile, index
    else:
        is_listed = tile >= 0
        index = tl.load(table + num_tiles + tile, mask=is_listed, other=0) + tl.arange(0, PAIRS)
        there = index < tl.load(table + 2 * num_tiles + tile, mask=is_listed, other=0)
        return index, there, tl.load(order + index, mask=there, other=0)


@triton.jit
def store_pairs(
    sums,  # [PAIRS, OUTPUTS] float32, and the same of up rows
    pairs,  # as `pairs_of` returns them
    output,
    expert,
    bias,
    weights,  # of pairs, and of how many; of further pairs the weight is 1, None: there are none
    out,
    num_out,
    INWARD: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
):
    """The epilogue. INWARD: gate and up into sorted rows; else down into pairs, times their weights."""
    total, ups = sums
    index, there, pair = pairs
    pair_weights, num_weighted = weights
    inside = output < num_out
    if bias is not None:
        biases = bias + expert.to(tl.int64) * (2 * num_out if GATED else num_out) + output
        total += tl.load(biases, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(biases + num_out, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # rounded as the output of a separate GEMM would be
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        up = ups.to(out.dtype.element_ty).to(tl.float32)
        if GATE == 2:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            gate = gate * tl.sigmoid(gate * ALPHA)
        elif GATE == 1:
            # 0.5 * (1 + tanh(y)) is sigmoid(2 y)
            gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        else:
            gate = gate * tl.sigmoid(gate)
        total = gate.to(out.dtype.element_ty).to(tl.float32) * up
        target = index
    elif INWARD:
        total = tl.maximum(total.to(out.dtype.element_ty).to(tl.float32), 0.0)
        total *= total
        target = index
    else:
        is_weighted = there
        if num_weighted is not None:
            is_weighted = there & (pair < num_weighted)
        total *= tl.load(pair_weights + pair, mask=is_weighted, other=1.0)[:, None]
        target = pair
    where = out + target.to(tl.int64)[:, None] * num_out + output[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
