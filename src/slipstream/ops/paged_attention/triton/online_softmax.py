"""Online softmax over the keys of one row and kv head, block by block: page lookup, masks, running sums.

Weights are exp2 of float32 scores, with the scale folded in.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    sums,  # so far: weighted sum of values [TILE, BLOCK_D], highest score [TILE] times log2(e), sum of weights [TILE]
    queries,  # [TILE, BLOCK_D], the rest of them [TILE, BLOCK_REST], their positions [TILE], scale and soft cap
    pages,  # keys and values of the kv head, page table of the row, strides of a page and of a slot
    scales,  # of keys and values in FP8: of the kv head, and their strides of a page and of a slot; else None
    begin,  # a multiple of BLOCK_N
    end,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    MAYBE_UNSEEN: tl.constexpr,
):
    """The sums after the keys from `begin` to `end` of one kv head and row. With a REST, a key has that many numbers
    after the DIM elements that are also its value. With MAYBE_UNSEEN a query may see no key of a block."""
    acc, top, total = sums
    q, q_rest, position, scale, soft_cap = queries
    keys, values, table, page_stride, slot_stride = pages
    key_scales, value_scales, scale_page = scales
    PRECISION: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    dim = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    if SOFT_CAP:
        factor = LOG2E * soft_cap
    else:
        factor = LOG2E * scale
    lowest = tl.min(position, 0)
    # page numbers are loaded one block ahead: a load that depends on a load of the same iteration is not pipelined
    page = tl.load(table + (begin + lane) // PAGE, mask=begin + lane < end, other=0)
    for start in range(begin, end, BLOCK_N):
        key = start + lane
        slot = page * page_stride + key % PAGE * slot_stride
        offset = slot[:, None] + dim[None, :]
        scale_at = page * scale_page + key % PAGE
        ahead = key + BLOCK_N
        page = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
        if MASKED:
            there = key < end
            if WINDOW:
                # pages before the window may be freed
                there = there & (key > lowest - WINDOW)
            inside = there[:, None] & (dim < DIM)[None, :]
            k = tl.load(keys + offset, mask=inside, other=0.0)
        elif DIM == BLOCK_D:
            k = tl.load(keys + offset)
        else:
            k = tl.load(keys + offset, mask=(dim < DIM)[None, :], other=0.0)
        if REST:
            v = k
        elif MASKED:
            v = tl.load(values + offset, mask=inside, other=0.0)
        elif DIM == BLOCK_D:
            v = tl.load(values + offset)
        else:
            v = tl.load(values + offset, mask=(dim < DIM)[None, :], other=0.0)
        if key_scales is not None:
            held = key < end
            if WINDOW:
                held = held & (key > lowest - WINDOW)
            k, v = k.to(q.dtype), v.to(q.dtype)
            key_scale = tl.load(key_scales + scale_at, mask=held, other=0.0)
            value_scale = tl.load(value_scales + scale_at, mask=held, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if key_scales is not None:
            score *= key_scale[None, :]
        if REST:
            tail = tl.arange(0, BLOCK_REST)
            after = (key < end)[:, None] & (tail < REST)[None, :]
            k_rest = tl.load(keys + slot[:, None] + (DIM + tail)[None, :], mask=after, other=0.0)
            score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision=PRECISION)
        if SOFT_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), finite at both ends
            score = 1.0 - 2.0 / (tl.exp2(score * (scale / soft_cap * 2.0 * LOG2E)) + 1.0)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * factor)
        base = higher
        if MAYBE_UNSEEN:
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * factor - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        if value_scales is not None:
            weight *= value_scale[None, :]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        top = higher
    return acc, top, total
