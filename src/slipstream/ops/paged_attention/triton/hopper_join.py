"""Merges the splits of a row, for decode attention on Hopper."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def join_splits(
    out,
    sums,
    stats,
    first,
    num_splits,
    kv_head,
    out_head,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
):
    """Merges all splits of a query and kv head into its output, a few at a time, in key order."""
    LANES: gl.constexpr = triton.next_power_of_2(GROUP)
    # a thread sums all splits of its outputs, so that warps exchange nothing
    SPLITS: gl.constexpr = max(1, min(8, 4096 // (LANES * DIM)))
    WIDTH: gl.constexpr = max(1, min(4, LANES * DIM // 128))  # outputs of a thread side by side
    COLUMNS: gl.constexpr = max(1, min(4, DIM // (32 * WIDTH)))  # warps side by side
    PARTS: gl.constexpr = gl.BlockedLayout([SPLITS, 1, WIDTH], [1, 1, 32], [1, 4 // COLUMNS, COLUMNS], [2, 1, 0])
    EACH: gl.constexpr = gl.SliceLayout(2, PARTS)  # [SPLITS, LANES]
    WHOLE: gl.constexpr = gl.SliceLayout(0, PARTS)  # [LANES, DIM]
    split = gl.expand_dims(gl.arange(0, SPLITS, gl.SliceLayout(1, EACH)), 1)
    lane = gl.expand_dims(gl.arange(0, LANES, gl.SliceLayout(0, EACH)), 0)
    dim = gl.arange(0, DIM, gl.SliceLayout(0, WHOLE))
    head = kv_head * GROUP + lane
    top = gl.full([LANES], float("-inf"), gl.float32, gl.SliceLayout(0, EACH))
    total = gl.zeros([LANES], gl.float32, gl.SliceLayout(0, EACH))
    acc = gl.zeros([LANES, DIM], gl.float32, WHOLE)
    for start in range(0, num_splits, SPLITS):
        partial = (first + start + split) * (KV_HEADS * GROUP) + head
        mask = (start + split < num_splits) & (lane < GROUP)
        # bypass L1: other multiprocessors wrote these
        tops = gl.load(stats + partial * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(stats + partial * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        where = sums + gl.expand_dims(partial * DIM, 2) + gl.expand_dims(gl.expand_dims(dim, 0), 0)
        part = gl.load(where, mask=gl.expand_dims(mask, 2), other=0.0, cache_modifier=".cg")
        higher = gl.maximum(top, gl.max(tops, 0))
        # lanes past the group have no maximum
        base = gl.where(higher == float("-inf"), 0.0, higher)
        fade = gl.exp2(top - base)
        weight = gl.exp2(tops - gl.expand_dims(base, 0))
        total = total * fade + gl.sum(totals * weight, 0)
        fade = gl.convert_layout(fade, gl.SliceLayout(1, WHOLE))
        acc = acc * gl.expand_dims(fade, 1) + gl.sum(part * gl.expand_dims(weight, 2), 0)
        top = higher
    total = gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, WHOLE))
    lane = gl.arange(0, LANES, gl.SliceLayout(1, WHOLE))
    where = out + gl.expand_dims((kv_head * GROUP + lane) * out_head, 1) + gl.expand_dims(dim, 0)
    gl.store(where, (acc / gl.expand_dims(total, 1)).to(out.dtype.element_ty), mask=gl.expand_dims(lane < GROUP, 1))
