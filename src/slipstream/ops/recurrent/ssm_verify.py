"""State space scans with drafts on CUDA: accepted tokens are replayed, then a row's draws are computed in order.

A program keeps a block of one row's state in registers: it reads and writes it once per step, however many tokens it
replays and draws. In steps with longer chunks the kernels only replay, before the chunks are computed. A first token
that the state has seen has size 0, which keeps the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.recurrent.ssm import SelectiveWeights, SsdWeights
from slipstream.ops.recurrent.steps import RecurrentSteps


def ssd_verify(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    state: torch.Tensor,
    steps: RecurrentSteps,
    replay: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Mamba-2: fills `out` in a step of one token per row, else only brings states up to their rows."""
    num_heads, head_dim = x.shape[1:]
    num_groups, state_size = b.shape[1:]
    block = min(32, triton.next_power_of_2(head_dim))
    assert replay[0].is_contiguous()
    _ssd_kernel[(len(steps.slots), num_heads, triton.cdiv(head_dim, block))](
        (x, dt, b, c, out),
        weights,
        (state, replay),
        steps.drafted_rows,
        (x.stride(0), dt.stride(0), b.stride(0), c.stride(0)),
        (state.stride(0), replay.stride(0)),
        HEADS=num_heads,
        HEADS_OF_GROUP=num_heads // num_groups,
        DIM=head_dim,
        STATE=state_size,
        COLUMNS=replay.shape[1],
        SIZE=replay.shape[2],
        DRAWS=steps.is_single,
        BLOCK=block,
        PADDED_STATE=triton.next_power_of_2(state_size),
        num_warps=4,
    )


def selective_verify(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor,
    weights: SelectiveWeights,
    state: torch.Tensor,
    steps: RecurrentSteps,
    replay: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Mamba-1, as `ssd_verify`."""
    num_channels, state_size = x.shape[1], b.shape[1]
    block = min(64, triton.next_power_of_2(num_channels))
    assert replay[0].is_contiguous()
    _selective_kernel[(len(steps.slots), triton.cdiv(num_channels, block))](
        (x, dt, b, c, z, out),
        weights,
        (state, replay),
        steps.drafted_rows,
        (x.stride(0), dt.stride(0), b.stride(0), c.stride(0), z.stride(0)),
        (state.stride(0), replay.stride(0)),
        CHANNELS=num_channels,
        STATE=state_size,
        COLUMNS=replay.shape[1],
        SIZE=replay.shape[2],
        DRAWS=steps.is_single,
        BLOCK=block,
        PADDED_STATE=triton.next_power_of_2(state_size),
        num_warps=4,
    )


# grid: (draws, heads, blocks of a head); only the first draw of each row has work
@triton.jit
def _ssd_kernel(
    tokens,
    weights,
    stored,
    rows,
    token_strides,
    slot_strides,
    HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_STATE: tl.constexpr,
):
    x, dt, b, c, out = tokens
    a_log, dt_bias, d, dt_min, dt_max = weights
    state, replay = stored
    slots, first_positions, bases, counts, save_slots, save_positions = rows
    x_stride, dt_stride, b_stride, c_stride = token_strides
    state_stride, replay_stride = slot_strides
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(first_positions + row)
    base = tl.load(bases + row)
    if DRAWS:
        count = tl.load(counts + row)
        if count == 0:
            return
    else:
        count = 0
        if base >= first:
            return
    dim = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_STATE)
    is_dim = dim < DIM
    is_column = column < STATE
    inside = is_dim[:, None] & is_column[None, :]
    cells = (head * DIM + dim)[:, None] * STATE + column[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    saved = tl.load(save_slots + row).to(tl.int64)
    border = tl.load(save_positions + row)
    own = state + slot * state_stride + cells
    current = tl.load(own, mask=inside & (base > 0), other=0.0)
    ring = replay + slot * replay_stride
    # numbers of a entry of the ring: x of all heads, b of all groups, dt of all heads
    at_x = head * DIM + dim
    at_b = HEADS * DIM + head // HEADS_OF_GROUP * STATE + column
    at_dt = SIZE - HEADS + head
    rate = -tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head)
    skip = tl.load(d + head)
    for position in range(base, first):
        entry = ring + (position % COLUMNS) * SIZE
        now = tl.load(entry + at_x, mask=is_dim, other=0.0).to(tl.float32)
        written = tl.load(entry + at_b, mask=is_column, other=0.0).to(tl.float32)
        size = softplus(tl.load(entry + at_dt).to(tl.float32) + bias)
        size = tl.minimum(tl.maximum(size, dt_min), dt_max)
        current = current * tl.exp(rate * size) + (size * now)[:, None] * written[None, :]
        if (saved >= 0) & (position + 1 == border):
            tl.store(state + saved * state_stride + cells, current, mask=inside)
    if count != 1:
        tl.store(own, current, mask=inside)
    for index in range(count):
        token = row + index
        given_x = tl.load(x + token * x_stride + head * DIM + dim, mask=is_dim, other=0.0)
        group = head // HEADS_OF_GROUP * STATE + column
        given_b = tl.load(b + token * b_stride + group, mask=is_column, other=0.0)
        read = tl.load(c + token * c_stride + group, mask=is_column, other=0.0).to(tl.float32)
        given_dt = tl.load(dt + token * dt_stride + head)
        now = given_x.to(tl.float32)
        size = softplus(given_dt.to(tl.float32) + bias)
        size = tl.minimum(tl.maximum(size, dt_min), dt_max)
        size = tl.where(first + index >= base, size, 0.0)
        current = current * tl.exp(rate * size) + (size * now)[:, None] * given_b.to(tl.float32)[None, :]
        made = tl.sum(current * read[None, :], 1) + skip * now
        tl.store(out + (token * HEADS + head) * DIM + dim, made.to(out.dtype.element_ty), mask=is_dim)
        if count > 1:  # no program reads the entries of this step's tokens
            entry = ring + ((first + index) % COLUMNS) * SIZE
            is_first_block = tl.program_id(2) == 0
            tl.store(entry + at_x, given_x, mask=is_dim)
            tl.store(entry + at_b, given_b, mask=is_column & is_first_block & (head % HEADS_OF_GROUP == 0))
            if is_first_block:
                tl.store(entry + at_dt, given_dt)
    if count == 1:
        tl.store(own, current, mask=inside)
        if (saved >= 0) & (first + 1 == border):
            tl.store(state + saved * state_stride + cells, current, mask=inside)


# grid: (draws, blocks of channels); only the first draw of each row has work
@triton.jit
def _selective_kernel(
    tokens,
    weights,
    stored,
    rows,
    token_strides,
    slot_strides,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_STATE: tl.constexpr,
):
    x, dt, b, c, z, out = tokens
    a_log, dt_bias, d = weights
    state, replay = stored
    slots, first_positions, bases, counts, save_slots, save_positions = rows
    x_stride, dt_stride, b_stride, c_stride, z_stride = token_strides
    state_stride, replay_stride = slot_strides
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(first_positions + row)
    base = tl.load(bases + row)
    if DRAWS:
        count = tl.load(counts + row)
        if count == 0:
            return
    else:
        count = 0
        if base >= first:
            return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_STATE)
    is_channel = channel < CHANNELS
    is_column = column < STATE
    inside = is_channel[:, None] & is_column[None, :]
    cells = channel[:, None] * STATE + column[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    saved = tl.load(save_slots + row).to(tl.int64)
    border = tl.load(save_positions + row)
    own = state + slot * state_stride + cells
    current = tl.load(own, mask=inside & (base > 0), other=0.0)
    ring = replay + slot * replay_stride
    a = -tl.exp(tl.load(a_log + cells, mask=inside, other=0.0))
    bias = tl.load(dt_bias + channel, mask=is_channel, other=0.0)
    skip = tl.load(d + channel, mask=is_channel, other=0.0)
    for position in range(base, first):
        entry = ring + (position % COLUMNS) * SIZE
        now = tl.load(entry + channel, mask=is_channel, other=0.0).to(tl.float32)
        size = tl.load(entry + CHANNELS + channel, mask=is_channel, other=0.0)
        written = tl.load(entry + 2 * CHANNELS + column, mask=is_column, other=0.0).to(tl.float32)
        size = softplus(size.to(tl.float32) + bias)
        current = current * tl.exp(size[:, None] * a) + (size * now)[:, None] * written[None, :]
        if (saved >= 0) & (position + 1 == border):
            tl.store(state + saved * state_stride + cells, current, mask=inside)
    if count != 1:
        tl.store(own, current, mask=inside)
    for index in range(count):
        token = row + index
        given_x = tl.load(x + token * x_stride + channel, mask=is_channel, other=0.0)
        given_dt = tl.load(dt + token * dt_stride + channel, mask=is_channel, other=0.0)
        given_b = tl.load(b + token * b_stride + column, mask=is_column, other=0.0)
        read = tl.load(c + token * c_stride + column, mask=is_column, other=0.0).to(tl.float32)
        gate = tl.load(z + token * z_stride + channel, mask=is_channel, other=0.0).to(tl.float32)
        now = given_x.to(tl.float32)
        size = tl.where(first + index >= base, softplus(given_dt.to(tl.float32) + bias), 0.0)
        current = current * tl.exp(size[:, None] * a) + (size * now)[:, None] * given_b.to(tl.float32)[None, :]
        made = tl.sum(current * read[None, :], 1) + skip * now
        made *= gate * tl.sigmoid(gate)
        tl.store(out + token * CHANNELS + channel, made.to(out.dtype.element_ty), mask=is_channel)
        if count > 1:  # no program reads the entries of this step's tokens
            entry = ring + ((first + index) % COLUMNS) * SIZE
            tl.store(entry + channel, given_x, mask=is_channel)
            tl.store(entry + CHANNELS + channel, given_dt, mask=is_channel)
            tl.store(entry + 2 * CHANNELS + column, given_b, mask=is_column & (tl.program_id(1) == 0))
    if count == 1:
        tl.store(own, current, mask=inside)
        if (saved >= 0) & (first + 1 == border):
            tl.store(state + saved * state_stride + cells, current, mask=inside)


# Softplus inside a kernel.


@triton.jit
def softplus(x):
    """Past 20 it is its argument, as in torch."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
