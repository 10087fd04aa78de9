"""Mamba-2 over packed rows on CUDA, in two launches.

The first computes, for all chunks at once, what does not depend on the state: the step sizes, the log2 of the decay
from the chunk's start to each token, and the scores of c with b, which all heads of a group share. The second passes
the state of a head through the chunks of each row in order. A chunk is three matrix products: the scores times the
decay between two tokens applied to x, the state read by c, and the state's update. Columns of a head do not depend on
each other, so a head may be split over them. A state leaves the registers only at the end of its row and at saves:
states of all chunks would be several times the bytes of x.

An index in a chunk is a position modulo STATE_CHUNK, so the indices of a row's first chunk may begin past 0. Products
take inputs of the model's dtype and sum in float32; the state stays in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.ops.platform.dispatch import device_limits, has_hopper_kernels
from slipstream.ops.recurrent.ssm import SsdWeights
from slipstream.ops.recurrent.ssm_verify import softplus
from slipstream.ops.recurrent.steps import RecurrentSteps
from slipstream.ops.recurrent.steps_triton import row_programs

_HEADS = 16  # whose decays a program of the first launch computes at once


def scan_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    state: torch.Tensor,
    steps: RecurrentSteps,
    out: torch.Tensor,
) -> None:
    """Fills `out` [T, heads, head dim] and the states; the reference describes the other arguments."""
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_size = b.shape[1:]
    assert steps.chunks is not None
    is_hopper = _fits_hopper(x, b, c)
    sizes, totals = torch.empty((2, num_heads, num_tokens), dtype=torch.float32, device=x.device).unbind(0)
    logs = None
    if is_hopper:
        logs = torch.empty((len(steps.chunks), num_heads, 2, STATE_CHUNK), dtype=torch.float32, device=x.device)
    scores = torch.empty((num_tokens, num_groups, STATE_CHUNK), dtype=x.dtype, device=x.device)
    shape = dict(
        HEADS=num_heads,
        HEADS_OF_GROUP=num_heads // num_groups,
        STATE=state_size,
        PADDED_STATE=max(16, triton.next_power_of_2(state_size)),
        CHUNK=STATE_CHUNK,
        # of float32 inputs only: as accurate as float32; products of float32 without tensor cores would spill
        PRECISION="tf32x3",
    )
    _factors_kernel[(len(steps.chunks), num_groups)](
        (dt, b, c),
        weights,
        (sizes, totals, logs, scores),
        (steps.starts, steps.first_positions, steps.seen_positions),
        steps.chunks,
        num_tokens,
        (dt.stride(0), b.stride(0), c.stride(0)),
        BLOCK=_HEADS,
        **shape,
        num_warps=4,
        num_stages=1,
    )
    if logs is not None:
        from slipstream.ops.recurrent.ssm_hopper import pass_chunks

        pass_chunks(x, b, c, scores, logs, weights.d, state, steps, out)
    num_rows = len(steps.slots)
    tile = choose_tile(head_dim, state_size, num_rows * num_heads, x.element_size(), x.device)
    blocks = triton.cdiv(head_dim, tile["BLOCK"])
    _pass_kernel[(num_heads, blocks, row_programs(num_rows, num_heads * blocks, x.device))](
        (x, b, c, out),
        (sizes, totals, scores),
        weights.d,
        state,
        (steps.slots, steps.starts, steps.first_positions, steps.seen_positions),
        (steps.chunks, steps.chunk_starts),
        num_tokens,
        num_rows,
        (x.stride(0), b.stride(0), c.stride(0)),
        state.stride(0),
        SINGLE=is_hopper,
        DIM=head_dim,
        **shape,
        **tile,
    )


def _fits_hopper(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
    """Whether `ssm_hopper.py` has the sizes of these inputs, and TMA can copy them."""
    has_sizes = x.dtype is torch.bfloat16 and x.shape[2] == 64 and b.shape[2] == 128
    has_pairs = x.shape[1] // b.shape[1] % 2 == 0
    is_aligned = all(part.data_ptr() % 16 == 0 and part.stride(0) % 8 == 0 for part in (x, b, c))
    return has_sizes and has_pairs and is_aligned and has_hopper_kernels(x.device)


def choose_tile(
    head_dim: int, state_size: int, num_heads: int, element_size: int, device: torch.device
) -> dict[str, int]:
    """Columns of a head per program (BLOCK), num_warps and num_stages. `num_heads`: of all rows."""
    multiprocessors, shared_memory = device_limits(device)
    # heads are split if they are fewer than programs that run at once; wider tiles of large states spill registers
    is_wide = num_heads >= 2 * multiprocessors and state_size <= 128 and element_size == 2
    block = max(16, min(64 if is_wide else 32, triton.next_power_of_2(head_dim)))
    # two tiles each of b and c, and 36 KB for the others
    pipelined = 4 * STATE_CHUNK * triton.next_power_of_2(state_size) * element_size + 36_000
    can_pipeline = element_size == 2 and pipelined <= shared_memory
    return {"BLOCK": block, "num_warps": 4, "num_stages": 2 if can_pipeline else 1}


# grid: (chunks, groups)
@triton.jit(do_not_specialize=["num_tokens"])
def _factors_kernel(
    tokens,
    weights,
    factors,
    rows,
    chunks,
    num_tokens,
    token_strides,
    HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dt, b, c = tokens
    a_log, dt_bias, _, dt_min, dt_max = weights
    sizes, totals, logs, scores = factors
    starts, first_positions, seen_positions = rows
    dt_stride, b_stride, c_stride = token_strides
    entry = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.load(chunks + entry * 4)
    if row < 0:
        return
    start = tl.load(starts + row)
    begin = tl.load(first_positions + row)
    first = tl.load(chunks + entry * 4 + 1)
    count = tl.load(chunks + entry * 4 + 2)
    shift = (begin + first - start) % CHUNK  # the first token's index
    index = tl.arange(0, CHUNK)
    inside = (index >= shift) & (index < shift + count)
    token = (first - shift + index).to(tl.int64)
    is_seen = (tl.load(seen_positions + row) > begin) & (token == start)

    for offset in range(0, HEADS_OF_GROUP, BLOCK):
        of_group = offset + tl.arange(0, BLOCK)
        is_head = of_group < HEADS_OF_GROUP
        head = group * HEADS_OF_GROUP + of_group
        mask = inside[:, None] & is_head[None, :]
        rate = -1.4426950408889634 * tl.exp(tl.load(a_log + head, mask=is_head, other=0.0))[None, :]
        bias = tl.load(dt_bias + head, mask=is_head, other=0.0)[None, :]
        given = tl.load(dt + token[:, None] * dt_stride + head[None, :], mask=mask, other=0.0).to(tl.float32)
        size = tl.minimum(tl.maximum(softplus(given + bias), dt_min), dt_max)
        size = tl.where(is_seen[:, None], 0.0, size)  # 0 keeps the state
        target = head.to(tl.int64)[None, :] * num_tokens + token[:, None]
        tl.store(sizes + target, size, mask=mask)
        total = tl.cumsum(tl.where(mask, size * rate, 0.0), 0)
        tl.store(totals + target, total, mask=mask)
        if logs is not None:  # of all indices: the total does not change past the last token, others have size 0
            target = logs + ((entry.to(tl.int64) * HEADS + head) * (2 * CHUNK))[None, :] + index[:, None]
            tl.store(target, total, mask=is_head[None, :])
            tl.store(target + CHUNK, total - tl.log2(tl.where(mask, size, 0.0)), mask=is_head[None, :])

    if tl.load(starts + row + 1) - start == 1:
        return  # the pass computes rows of one token directly
    column = tl.arange(0, PADDED_STATE)
    mask = inside[:, None] & (column < STATE)[None, :]
    read = tl.load(c + token[:, None] * c_stride + group * STATE + column[None, :], mask=mask, other=0.0)
    written = tl.load(b + token[:, None] * b_stride + group * STATE + column[None, :], mask=mask, other=0.0)
    seen = tl.dot(read, tl.trans(written), input_precision=PRECISION)
    seen = tl.where(index[:, None] < index[None, :], 0.0, seen)
    target = scores + (token * (HEADS // HEADS_OF_GROUP) + group)[:, None] * CHUNK + index[None, :]
    tl.store(target, seen.to(scores.dtype.element_ty), mask=inside[:, None])


# grid: (heads, blocks of a head, programs that take turns in rows); padding rows have no program
@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _pass_kernel(
    tokens,
    factors,
    d,
    state,
    rows,
    parts,
    num_tokens,
    num_rows,
    token_strides,
    slot_stride,
    HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    SINGLE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """SINGLE: only rows of one token."""
    x, b, c, out = tokens
    sizes, totals, scores = factors
    slots, starts, first_positions, seen_positions = rows
    chunks, chunk_starts = parts
    x_stride, b_stride, c_stride = token_strides
    num_entries = tl.load(chunk_starts + num_rows)
    if num_entries == 0:
        return
    last_row = tl.load(chunks + (num_entries - 1) * 4)
    head = tl.program_id(0)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_STATE)
    is_dim = tl.full((BLOCK,), True, tl.int1) if DIM % BLOCK == 0 else dim < DIM
    is_column = tl.full((PADDED_STATE,), True, tl.int1) if STATE == PADDED_STATE else column < STATE
    is_cell = is_column[:, None] & is_dim[None, :]
    cells = (head * DIM + dim)[None, :] * STATE + column[:, None]
    skip = tl.load(d + head)
    sizes += head.to(tl.int64) * num_tokens
    totals += head.to(tl.int64) * num_tokens
    x += head * DIM
    out += head * DIM
    b += head // HEADS_OF_GROUP * STATE
    c += head // HEADS_OF_GROUP * STATE
    scores += head // HEADS_OF_GROUP * CHUNK
    # the rows with many tokens come last and take longest
    for turn in range(tl.program_id(2), last_row + 1, tl.num_programs(2)):
        row = last_row - turn
        start = tl.load(starts + row)
        end = tl.load(starts + row + 1)
        own = state + tl.load(slots + row).to(tl.int64) * slot_stride
        begin = tl.load(first_positions + row)
        is_own = end - start == 1 if SINGLE else start < end
        current = tl.load(own + cells, mask=is_cell & is_own & (tl.load(seen_positions + row) > 0), other=0.0)
        entry = tl.load(chunk_starts + row)
        last = tl.load(chunk_starts + row + 1) - 1

        if end - start == 1:
            token = start.to(tl.int64)
            size = tl.load(sizes + token)
            now = tl.load(x + token * x_stride + dim, mask=is_dim, other=0.0).to(tl.float32)
            written = tl.load(b + token * b_stride + column, mask=is_column, other=0.0).to(tl.float32)
            read = tl.load(c + token * c_stride + column, mask=is_column, other=0.0).to(tl.float32)
            current = current * tl.exp2(tl.load(totals + token)) + written[:, None] * (size * now)[None, :]
            made = tl.sum(current * read[:, None], 0) + skip * now
            tl.store(out + token * (HEADS * DIM) + dim, made.to(out.dtype.element_ty), mask=is_dim)
            saved = tl.load(chunks + entry * 4 + 3)
            if saved >= 0:
                tl.store(state + saved.to(tl.int64) * slot_stride + cells, current, mask=is_cell)
        elif not SINGLE:
            kind: tl.constexpr = x.dtype.element_ty
            SCORES: tl.constexpr = HEADS // HEADS_OF_GROUP * CHUNK
            index = tl.arange(0, CHUNK)
            saved = tl.load(chunks + entry * 4 + 3)
            for first in range(tl.where(start < end, start - begin % CHUNK, end), end, CHUNK):
                following = tl.load(chunks + tl.minimum(entry + 1, last) * 4 + 3)
                # addresses from tokens, not from indices: what all chunks share would be kept in registers
                token = first + index
                at = token.to(tl.int64)[:, None]
                inside = (token >= start) & (token < end)
                in_state = inside[:, None] & is_column[None, :]
                in_head = inside[:, None] & is_dim[None, :]
                read = tl.load(c + at * c_stride + column[None, :], mask=in_state, other=0.0)
                written = tl.load(b + at * b_stride + column[None, :], mask=in_state, other=0.0)
                now = tl.load(x + at * x_stride + dim[None, :], mask=in_head, other=0.0)
                seen = tl.load(scores + at * SCORES + index[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
                size = tl.load(sizes + token, mask=inside, other=0.0)
                total = tl.load(totals + token, mask=inside, other=0.0)
                whole = tl.load(totals + tl.minimum(first + CHUNK, end) - 1)

                is_later = token[:, None] < token[None, :]
                seen *= tl.exp2(tl.where(is_later, float("-inf"), total[:, None] - total[None, :])) * size[None, :]
                seen = tl.where(token[:, None] > token[None, :], seen, seen + tl.where(is_later, 0.0, skip))
                made = tl.dot(read, current.to(kind), input_precision=PRECISION) * tl.exp2(total)[:, None]
                made = tl.dot(seen.to(kind), now, made, input_precision=PRECISION)
                tl.store(out + at * (HEADS * DIM) + dim[None, :], made.to(out.dtype.element_ty), mask=in_head)
                weighted = (now * (size * tl.exp2(whole - total))[:, None]).to(kind)
                current = tl.dot(tl.trans(written), weighted, current * tl.exp2(whole), input_precision=PRECISION)
                if saved >= 0:
                    tl.store(state + saved.to(tl.int64) * slot_stride + cells, current, mask=is_cell)
                saved = following
                entry += 1
        own = state + tl.load(slots + row).to(tl.int64) * slot_stride  # loaded again: registers are short in the loop
        tl.store(own + cells, current, mask=is_cell & is_own)
