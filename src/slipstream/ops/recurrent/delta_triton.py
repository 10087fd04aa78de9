"""Gated delta rule over packed rows on CUDA, in two launches.

The first computes, for all chunks at once, what does not depend on the state: the inverse T of each chunk's triangular
system, T applied to values and keys, and the scores of queries with keys. The second passes the state through the
chunks of each row in order, and makes outputs and saves on the way. Value columns do not depend on each other, so a row
is split over them: a single long prompt has value heads * value dim / columns programs.

Products take inputs of the model's dtype and sum in float32; the state stays in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.ops.recurrent.delta_decode_kernel import delta_decode
from slipstream.ops.recurrent.delta_parts import delta_gates
from slipstream.ops.recurrent.delta_rule import L2_EPS
from slipstream.ops.recurrent.delta_verify import delta_replay_
from slipstream.ops.recurrent.steps import RecurrentSteps
from slipstream.ops.recurrent.steps_triton import empty_outputs, row_programs

_COLUMNS = (
    64  # value columns of a program: 510 us for 8 rows of 1,024 tokens at Qwen3-Next's sizes on the H200; 32: 574
)
_MANY_PROGRAMS = 264  # two for each SM of an H200; with fewer, programs have half the columns


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    steps: RecurrentSteps,
    scale: float,
    l2_norm_qk: bool = True,
    deferred: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, which describes the arguments."""
    num_tokens, heads, dim = v.shape
    key_heads, key_dim = q.shape[1:]
    assert q.stride() == k.stride() and q.stride()[1:] == (key_dim, 1) and v.stride()[1:] == (dim, 1)
    assert g.is_contiguous() and beta.is_contiguous() and state.stride()[1:] == (key_dim * dim, dim, 1)
    out = empty_outputs(v.shape, v, steps)
    num_rows = len(steps.slots)
    if not num_tokens or not num_rows:
        return out
    key_block, value_block = (max(16, triton.next_power_of_2(size)) for size in (key_dim, dim))
    sizes = dict(
        HEADS=heads,
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
        DIM=dim,
        KEY_BLOCK=key_block,
        CHUNK=STATE_CHUNK,
        L2_EPS=L2_EPS,
        NORM=l2_norm_qk,
    )
    keys = values = scores = None
    if not steps.is_single:
        assert steps.chunks is not None
        keys = torch.empty((num_tokens, heads, key_dim), dtype=v.dtype, device=v.device)
        values = torch.empty((num_tokens, heads, dim), dtype=v.dtype, device=v.device)
        scores = torch.empty((num_tokens, heads, STATE_CHUNK), dtype=v.dtype, device=v.device)
        _factors_kernel[(len(steps.chunks), heads)](
            (q, k, v, g, beta),
            (keys, values, scores),
            (steps.starts, steps.first_positions, steps.seen_positions),
            steps.chunks,
            scale,
            (q.stride(0), v.stride(0)),
            BLOCK=value_block,
            **sizes,
            num_warps=2,
            num_stages=1,
        )
    is_split = num_rows * heads * triton.cdiv(dim, _COLUMNS) < _MANY_PROGRAMS
    columns = min(value_block, _COLUMNS // 2 if is_split else _COLUMNS)
    blocks = triton.cdiv(dim, columns)
    _pass_kernel[(heads, blocks, row_programs(num_rows, heads * blocks, v.device))](
        (q, k, v, g, beta),
        (keys, values, scores),
        out,
        (state, deferred),
        (steps.slots, steps.starts, steps.first_positions, steps.seen_positions, steps.save_slots),
        (steps.chunks, steps.chunk_starts),
        scale,
        num_rows,
        (q.stride(0), v.stride(0)),
        (state.stride(0), 0 if deferred is None else deferred.stride(0)),
        BLOCK=columns,
        PERIOD=1 if deferred is None else deferred.shape[2] + 1,
        ENTRY=0 if deferred is None else deferred.shape[3],
        **sizes,
        num_warps=4,
        num_stages=2,
    )
    return out


# grid: (chunks, value heads)
@triton.jit
def _factors_kernel(
    tokens,
    factors,
    rows,
    chunks,
    scale,
    token_strides,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    L2_EPS: tl.constexpr,
    NORM: tl.constexpr,
):
    q, k, v, g, beta = tokens
    keys, values, scores = factors
    starts, first_positions, seen_positions = rows
    key_stride, value_stride = token_strides
    entry = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(chunks + entry * 4)
    if row < 0:
        return
    start = tl.load(starts + row)
    if tl.load(starts + row + 1) - start == 1:
        return  # the pass computes rows of one token directly
    first = tl.load(chunks + entry * 4 + 1)
    count = tl.load(chunks + entry * 4 + 2)
    offset = tl.arange(0, CHUNK)
    inside = offset < count
    token = (first + offset).to(tl.int64)
    kind: tl.constexpr = values.dtype.element_ty

    dim = tl.arange(0, KEY_BLOCK)
    mask = inside[:, None] & (dim < KEY_DIM)[None, :]
    source = token[:, None] * key_stride + (head // GROUP) * KEY_DIM + dim[None, :]
    key = tl.load(k + source, mask=mask, other=0.0)
    query = tl.load(q + source, mask=mask, other=0.0)
    key_scale = _inverse_norm(key, L2_EPS, NORM)
    query_scale = _inverse_norm(query, L2_EPS, NORM) * scale
    # a token that the state has seen has neither
    is_new = inside & ((token != start) | (tl.load(seen_positions + row) <= tl.load(first_positions + row)))
    strength = tl.load(beta + token * HEADS + head, mask=is_new, other=0.0)
    total = tl.cumsum(tl.load(g + token * HEADS + head, mask=is_new, other=0.0), 0)  # log decay from the chunk's start

    later = offset[:, None] < offset[None, :]
    between = tl.where(later, 0.0, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))) * key_scale[None, :]
    at = (token * HEADS + head)[:, None]
    seen = tl.dot(query, tl.trans(key), input_precision="ieee") * between * query_scale[:, None]
    tl.store(scores + at * CHUNK + offset[None, :], seen.to(kind), mask=inside[:, None])
    system = tl.dot(key, tl.trans(key), input_precision="ieee") * between * (key_scale * strength)[:, None]
    # TF32 rounds less than the 16-bit types that the inverse is rounded to
    precision: tl.constexpr = "tf32x3" if kind == tl.float32 else "tf32"
    inverse = invert_unit_lower(tl.where(offset[:, None] > offset[None, :], system, 0.0), CHUNK, precision).to(kind)

    key = tl.load(k + source, mask=mask, other=0.0)  # again: registers are short above
    weighted = (key * (key_scale * strength * tl.exp(total))[:, None]).to(kind)
    made = tl.dot(inverse, weighted, input_precision="ieee")
    tl.store(keys + at * KEY_DIM + dim[None, :], made.to(kind), mask=mask)
    column = tl.arange(0, BLOCK)
    mask = inside[:, None] & (column < DIM)[None, :]
    value = tl.load(v + token[:, None] * value_stride + head * DIM + column[None, :], mask=mask, other=0.0)
    made = tl.dot(inverse, (value * strength[:, None]).to(kind), input_precision="ieee")
    tl.store(values + at * DIM + column[None, :], made.to(kind), mask=mask)


@triton.jit
def _inverse_norm(x, L2_EPS: tl.constexpr, NORM: tl.constexpr):
    """Of each row of x."""
    x = x.to(tl.float32)
    if NORM:
        return tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)
    else:
        return tl.sum(x * 0.0, 1) + 1.0


# grid: (value heads, blocks of value columns, programs that take turns in rows); padding rows have no program
@triton.jit(do_not_specialize=["num_rows"])
def _pass_kernel(
    tokens,
    factors,
    out,
    stored,
    rows,
    parts,
    scale,
    num_rows,
    token_strides,
    slot_strides,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    L2_EPS: tl.constexpr,
    NORM: tl.constexpr,
    PERIOD: tl.constexpr,
    ENTRY: tl.constexpr,
):
    q, k, v, g, beta = tokens
    keys, values, scores = factors
    state, deferred = stored
    slots, starts, first_positions, seen_positions, save_slots = rows
    chunks, chunk_starts = parts
    key_stride, value_stride = token_strides
    slot_stride, deferred_stride = slot_strides
    head = tl.program_id(0)
    dim = tl.arange(0, KEY_BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dim < KEY_DIM
    is_column = column < DIM
    is_inside = is_dim[:, None] & is_column[None, :]
    matrix = state + head * (KEY_DIM * DIM) + dim[:, None] * DIM + column[None, :]
    key_head = (head // GROUP) * KEY_DIM
    last_row = num_rows - 1
    if chunks is not None:
        num_entries = tl.load(chunk_starts + num_rows)
        last_row = tl.load(chunks + (num_entries - 1) * 4, mask=num_entries > 0, other=-1)
    # the rows with many tokens come last and take longest
    for turn in range(tl.program_id(2), last_row + 1, tl.num_programs(2)):
        row = last_row - turn
        start = tl.load(starts + row)
        num_tokens = tl.load(starts + row + 1) - start
        slot = tl.load(slots + row).to(tl.int64)
        own = slot * slot_stride
        position = tl.load(first_positions + row)
        num_seen = tl.load(seen_positions + row)
        current = tl.load(matrix + own, mask=is_inside & (num_seen > 0), other=0.0)
        if deferred is not None:
            before = 0.0
            kept = tl.maximum(position - num_seen, 0)
            for index in range(position % PERIOD - kept, position % PERIOD):
                entry = deferred + slot * deferred_stride + (head * (PERIOD - 1) + index) * ENTRY
                decay = tl.load(entry + KEY_DIM + DIM)
                old = tl.load(entry + dim, mask=is_dim, other=0.0)
                correction = tl.load(entry + KEY_DIM + column, mask=is_column, other=0.0)
                current = current * tl.exp(decay - before) + old[:, None] * correction[None, :]
                before = decay

        if num_tokens == 1:
            token = start.to(tl.int64)
            key = tl.load(k + token * key_stride + key_head + dim, mask=is_dim, other=0.0).to(tl.float32)
            query = tl.load(q + token * key_stride + key_head + dim, mask=is_dim, other=0.0).to(tl.float32)
            if NORM:
                key *= tl.rsqrt(tl.sum(key * key, 0) + L2_EPS)
                query *= tl.rsqrt(tl.sum(query * query, 0) + L2_EPS)
            value = tl.load(v + token * value_stride + head * DIM + column, mask=is_column, other=0.0).to(tl.float32)
            at = token * HEADS + head
            current *= tl.exp(tl.where(num_seen > position, 0.0, tl.load(g + at)))
            strength = tl.where(num_seen > position, 0.0, tl.load(beta + at))
            delta = strength * (value - tl.sum(current * key[:, None], 0))
            current += key[:, None] * delta[None, :]
            made = tl.sum(current * query[:, None], 0) * scale
            tl.store(out + at * DIM + column, made.to(out.dtype.element_ty), mask=is_column)
            if chunks is not None:
                saved = tl.load(chunks + tl.load(chunk_starts + row) * 4 + 3)
            elif save_slots is not None:
                saved = tl.load(save_slots + row)
            else:
                saved = -1
            tl.store(matrix + tl.maximum(saved, 0).to(tl.int64) * slot_stride, current, mask=is_inside & (saved >= 0))
        elif chunks is not None:
            kind: tl.constexpr = values.dtype.element_ty
            offset = tl.arange(0, CHUNK)
            for entry in range(tl.load(chunk_starts + row), tl.load(chunk_starts + row + 1)):
                first = tl.load(chunks + entry * 4 + 1)
                inside = offset < tl.load(chunks + entry * 4 + 2)
                saved = tl.load(chunks + entry * 4 + 3)
                token = (first + offset).to(tl.int64)
                at = token * HEADS + head
                source = token[:, None] * key_stride + key_head + dim[None, :]
                mask = inside[:, None] & is_dim[None, :]
                query = tl.load(q + source, mask=mask, other=0.0)
                key = tl.load(k + source, mask=mask, other=0.0)
                solved = tl.load(keys + at[:, None] * KEY_DIM + dim[None, :], mask=mask, other=0.0)
                mask = inside[:, None] & is_column[None, :]
                value = tl.load(values + at[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(tl.float32)
                seen = tl.load(scores + at[:, None] * CHUNK + offset[None, :], mask=inside[:, None], other=0.0)
                decay = tl.load(g + at, mask=inside & ((token != start) | (num_seen <= position)), other=0.0)
                total = tl.cumsum(decay, 0)
                whole = tl.sum(decay, 0)
                rounded = current.to(kind)
                value -= tl.dot(solved, rounded, input_precision="ieee")
                query_scale = _inverse_norm(query, L2_EPS, NORM) * scale * tl.exp(total)
                made = tl.dot(query, rounded, input_precision="ieee") * query_scale[:, None]
                made = tl.dot(seen, value.to(kind), made, input_precision="ieee")
                tl.store(out + at[:, None] * DIM + column[None, :], made.to(out.dtype.element_ty), mask=mask)
                value *= (_inverse_norm(key, L2_EPS, NORM) * tl.exp(whole - total))[:, None]
                current = tl.dot(tl.trans(key), value.to(kind), current * tl.exp(whole), input_precision="ieee")
                if saved >= 0:
                    tl.store(matrix + saved.to(tl.int64) * slot_stride, current, mask=is_inside)
        tl.store(matrix + own, current, mask=is_inside & (num_tokens > 0))


# Inverse of a unit lower triangular matrix inside a kernel.
#
# The diagonal blocks of 16 are inverted by forward substitution, all at once. With D their inverses and L the blocks
# below, the matrix is D^-1 (I + D L), and D L is nilpotent: its fourth power is zero for four blocks. A power series of
# the whole matrix would need one product less, but its terms grow with the binomials where keys are alike.


@triton.jit
def invert_unit_lower(below, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + below)^-1 [SIZE, SIZE] in float32, for a strictly lower triangular `below`; SIZE is 64."""
    tl.static_assert(SIZE == 64)
    BLOCKS: tl.constexpr = SIZE // 16
    row = tl.arange(0, 16)
    block = tl.arange(0, BLOCKS)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.reshape(below, (BLOCKS, 16, BLOCKS, 16))
    diagonal = tl.sum(tl.where(is_diagonal, parts, 0.0), 2)  # [blocks, rows, columns]
    unit = (row[:, None] == row[None, :]).to(tl.float32)[None, :, :]
    solved = tl.zeros((BLOCKS, 16, 16), tl.float32) + unit
    for number in range(1, 16):
        is_row = (row == number)[None, :, None]
        own = tl.sum(tl.where(is_row, diagonal, 0.0), 1)  # [blocks, columns] of this row
        solved -= tl.where(is_row, tl.sum(own[:, :, None] * solved, 1)[:, None, :], 0.0)
    inner = tl.where(is_diagonal, solved[:, :, None, :], 0.0)
    inner = tl.reshape(inner, (SIZE, SIZE))
    index = tl.arange(0, SIZE)
    outer = tl.where(index[:, None] // 16 > index[None, :] // 16, below, 0.0)
    step = -tl.dot(inner, outer, input_precision=PRECISION)
    square = tl.dot(step, step, input_precision=PRECISION)
    series = step + square + tl.dot(square, step, input_precision=PRECISION)  # I is added below
    return inner + tl.dot(series, inner, input_precision=PRECISION)


__all__ = ["delta_decode", "delta_gates", "delta_replay_", "gated_delta_rule"]
