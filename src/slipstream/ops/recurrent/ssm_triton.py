"""Mamba-2 on CUDA. Steps of one token per row: one launch, which reads and writes each state once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.recurrent.ssm import SelectiveWeights, SsdWeights
from slipstream.ops.recurrent.ssm_chunked import scan_chunks
from slipstream.ops.recurrent.ssm_verify import selective_verify, softplus, ssd_verify
from slipstream.ops.recurrent.steps import RecurrentSteps
from slipstream.ops.recurrent.steps_triton import empty_outputs


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    state: torch.Tensor,
    steps: RecurrentSteps,
    replay: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, which describes the arguments."""
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_size = b.shape[1:]
    assert x.stride()[1:] == (head_dim, 1) and b.stride()[1:] == c.stride()[1:] == (state_size, 1)
    assert dt.stride(1) == 1 and state[0].is_contiguous()
    out = empty_outputs(x.shape, x, steps)
    if not num_tokens or not len(steps.slots):
        return out
    if replay is not None:
        ssd_verify(x, dt, b, c, weights, state, steps, replay, out)
        if steps.is_single:
            return out
    if not steps.is_single:
        scan_chunks(x, dt, b, c, weights, state, steps, out)
        return out
    block = min(32, triton.next_power_of_2(head_dim))
    _ssd_kernel[(len(steps.slots), num_heads, triton.cdiv(head_dim, block))](
        (x, dt, b, c, out),
        weights,
        state,
        steps.rows,
        (x.stride(0), dt.stride(0), b.stride(0), c.stride(0)),
        state.stride(0),
        HEADS=num_heads,
        HEADS_OF_GROUP=num_heads // num_groups,
        DIM=head_dim,
        STATE=state_size,
        BLOCK=block,
        PADDED_STATE=triton.next_power_of_2(state_size),
        num_warps=4,
    )
    return out


# grid: (rows of one token each, heads, blocks of a head)
@triton.jit
def _ssd_kernel(
    tokens,
    weights,
    state,
    rows,
    token_strides,
    state_stride,
    HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_STATE: tl.constexpr,
):
    x, dt, b, c, out = tokens
    a_log, dt_bias, d, dt_min, dt_max = weights
    slots, first_positions, seen_positions, save_slots = rows
    x_stride, dt_stride, b_stride, c_stride = token_strides
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_STATE)
    is_dim = dim < DIM
    is_column = column < STATE
    inside = is_dim[:, None] & is_column[None, :]
    cells = (head * DIM + dim)[:, None] * STATE + column[None, :]
    own = state + tl.load(slots + row).to(tl.int64) * state_stride + cells
    num_seen = tl.load(seen_positions + row)
    current = tl.load(own, mask=inside, other=0.0)
    current = tl.where(num_seen == 0, 0.0, current)
    size = softplus(tl.load(dt + row * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head))
    size = tl.minimum(tl.maximum(size, dt_min), dt_max)
    size = tl.where(num_seen > tl.load(first_positions + row), 0.0, size)  # 0 keeps the state
    group = head // HEADS_OF_GROUP * STATE + column
    now = tl.load(x + row * x_stride + head * DIM + dim, mask=is_dim, other=0.0).to(tl.float32)
    written = tl.load(b + row * b_stride + group, mask=is_column, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_stride + group, mask=is_column, other=0.0).to(tl.float32)
    current = current * tl.exp(-tl.exp(tl.load(a_log + head)) * size) + (size * now)[:, None] * written[None, :]
    made = tl.sum(current * read[None, :], 1) + tl.load(d + head) * now
    tl.store(out + (row * HEADS + head) * DIM + dim, made.to(out.dtype.element_ty), mask=is_dim)
    tl.store(own, current, mask=inside)
    if save_slots is not None:
        saved = tl.load(save_slots + row)
        if saved >= 0:
            tl.store(state + saved.to(tl.int64) * state_stride + cells, current, mask=inside)


# Mamba-1 on CUDA: a program keeps a block of one row's state in registers and runs over the row's tokens.
#
# In decode this is one launch that reads and writes each state once. In prefill the tokens of a row are computed one
# after another; rows and blocks of channels run in parallel.

_TOKENS = 4  # whose inputs are loaded at once in prefill: their latency is most of a token's time


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor,
    weights: SelectiveWeights,
    state: torch.Tensor,
    steps: RecurrentSteps,
    replay: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, which describes the arguments."""
    num_channels, state_size = x.shape[1], b.shape[1]
    assert x.stride(1) == dt.stride(1) == b.stride(1) == c.stride(1) == z.stride(1) == 1 and state[0].is_contiguous()
    out = (torch.empty if steps.is_single else torch.zeros)(x.shape, dtype=x.dtype, device=x.device)
    if replay is not None:
        selective_verify(x, dt, b, c, z, weights, state, steps, replay, out)
        if steps.is_single:
            return out
    block = min(64, triton.next_power_of_2(num_channels))
    _selective_kernel[(len(steps.slots), triton.cdiv(num_channels, block))](
        (x, dt, b, c, z, out),
        weights,
        state,
        steps.rows,
        (steps.chunks, steps.chunk_starts),
        (x.stride(0), dt.stride(0), b.stride(0), c.stride(0), z.stride(0)),
        state.stride(0),
        CHANNELS=num_channels,
        STATE=state_size,
        BLOCK=block,
        PADDED_STATE=triton.next_power_of_2(state_size),
        TOKENS=1 if steps.is_single else _TOKENS,
        num_warps=4,
    )
    return out


@triton.jit
def _entries(chunks, chunk_starts, row):
    """First and last + 1 of the row's entries in `chunks`; with one token per row the entry is the row."""
    if chunks is None:
        return row, row + 1
    else:
        return tl.load(chunk_starts + row), tl.load(chunk_starts + row + 1)


@triton.jit
def _entry(chunks, save_slots, row, entry):
    """First token, number of tokens, and the slot to save the state to after them, or -1."""
    if chunks is not None:
        at = chunks + entry * 4
        return tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    elif save_slots is not None:
        return entry, 1, tl.load(save_slots + row)
    else:
        return entry, 1, -1


# grid: (rows, blocks of channels)
@triton.jit
def _selective_kernel(
    tokens,
    weights,
    state,
    rows,
    parts,
    token_strides,
    state_stride,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    x, dt, b, c, z, out = tokens
    a_log, dt_bias, d = weights
    slots, first_positions, seen_positions, save_slots = rows
    chunks, chunk_starts = parts
    x_stride, dt_stride, b_stride, c_stride, z_stride = token_strides
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_STATE)
    is_channel = channel < CHANNELS
    is_column = column < STATE
    inside = is_channel[:, None] & is_column[None, :]
    begin, end = _entries(chunks, chunk_starts, row)
    if begin == end:
        return
    cells = channel[:, None] * STATE + column[None, :]
    own = state + tl.load(slots + row).to(tl.int64) * state_stride + cells
    num_seen = tl.load(seen_positions + row)
    skipped = (num_seen > tl.load(first_positions + row)).to(tl.int32)  # tokens of the chunk that the state has seen
    current = tl.load(own, mask=inside, other=0.0)
    current = tl.where(num_seen == 0, 0.0, current)
    a = -tl.exp(tl.load(a_log + cells, mask=inside, other=0.0))
    bias = tl.load(dt_bias + channel, mask=is_channel, other=0.0)
    skip = tl.load(d + channel, mask=is_channel, other=0.0)
    for entry in range(begin, end):
        first, count, save = _entry(chunks, save_slots, row, entry)
        for offset in range(0, count, TOKENS):
            # all loads come before the first store, which they cannot pass
            inputs = ()
            for step in tl.static_range(TOKENS):
                token = tl.cast(first + offset + step, tl.int64)
                mask = is_channel & (offset + step < count)
                size = tl.load(dt + token * dt_stride + channel, mask=mask, other=0.0)
                now = tl.load(x + token * x_stride + channel, mask=mask, other=0.0)
                gate = tl.load(z + token * z_stride + channel, mask=mask, other=0.0)
                in_state = is_column & (offset + step < count)
                written = tl.load(b + token * b_stride + column, mask=in_state, other=0.0)
                read = tl.load(c + token * c_stride + column, mask=in_state, other=0.0)
                inputs = inputs + ((size, now, gate, written, read),)  # type: ignore[assignment]
            for step in tl.static_range(TOKENS):
                is_token = offset + step < count
                is_new = is_token & (offset + step >= skipped)
                size = tl.where(is_new, softplus(inputs[step][0].to(tl.float32) + bias), 0.0)  # 0 keeps the state
                now = inputs[step][1].to(tl.float32)
                gate = inputs[step][2].to(tl.float32)
                added = (size * now)[:, None] * inputs[step][3].to(tl.float32)[None, :]
                current = current * tl.exp(size[:, None] * a) + added
                made = tl.sum(current * inputs[step][4].to(tl.float32)[None, :], 1) + skip * now
                made *= gate * tl.sigmoid(gate)
                target = out + tl.cast(first + offset + step, tl.int64) * CHANNELS + channel
                tl.store(target, made.to(out.dtype.element_ty), mask=is_channel & is_token)
        skipped = skipped * 0
        if save >= 0:
            tl.store(state + tl.cast(save, tl.int64) * state_stride + cells, current, mask=inside)
    tl.store(own, current, mask=inside)


__all__ = ["selective_scan", "ssd_scan"]
