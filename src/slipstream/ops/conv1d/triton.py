"""Causal depthwise convolution on CUDA, in float32, rounded once.

Steps of one token per row take one launch: no token reads the column of the ring that it writes. Otherwise a second
launch writes the rings, after all programs of the first have read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.cache_spec import STATE_CHUNK
from slipstream.ops.conv1d.reference import Activation
from slipstream.ops.recurrent_steps import RecurrentSteps

_CHANNELS = 128  # of one program


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    steps: RecurrentSteps,
    activation: Activation = None,
) -> torch.Tensor:
    """As the reference, which describes the arguments."""
    num_tokens, channels = x.shape
    width = weight.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and state.stride()[1:] == (width, 1)
    new = torch.empty if steps.covers(num_tokens) else torch.zeros
    out = new((num_tokens, channels), dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(channels, _CHANNELS)
    num_entries = len(steps.slots) if steps.chunks is None else len(steps.chunks)
    if not num_entries:
        return out
    rows = (steps.slots, steps.starts, steps.first_positions)
    strides = (x.stride(0), state.stride(0))
    _conv_kernel[(num_entries, blocks)](
        x,
        weight,
        bias,
        state,
        out,
        *rows,
        steps.chunks,
        steps.save_slots,
        channels,
        *strides,
        SILU=activation == "silu",
        WIDTH=width,
        TOKENS=1 if steps.is_single else STATE_CHUNK,
        CHANNELS=_CHANNELS,
        num_warps=1 if steps.is_single else 4,
    )
    if not steps.is_single:
        _store_kernel[(len(steps.slots), blocks)](
            x,
            state,
            *rows,
            steps.chunks,
            steps.chunk_starts,
            channels,
            *strides,
            WIDTH=width,
            CHANNELS=_CHANNELS,
            num_warps=1,
        )
    return out


# grid: (chunks, or rows of one token each; blocks of channels)
@triton.jit
def _conv_kernel(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    starts,
    first_positions,
    chunks,
    save_slots,
    num_channels,
    x_stride,
    slot_stride,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    entry = tl.program_id(0)
    if chunks is None:
        row = entry
        first = entry
        count = 1
    else:
        row = tl.load(chunks + entry * 4)
        if row < 0:
            return
        first = tl.load(chunks + entry * 4 + 1)
        count = tl.load(chunks + entry * 4 + 2)
    start = tl.load(starts + row)
    begin = tl.load(first_positions + row)
    ring = state + tl.load(slots + row).to(tl.int64) * slot_stride
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    place = tl.arange(0, TOKENS)
    token = first + place
    offset = token - start  # in the row's tokens of this step
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for column in tl.static_range(WIDTH):
        back = WIDTH - 1 - column
        here = (place < count) & (offset >= back)
        source = x + (token - back).to(tl.int64)[:, None] * x_stride + channel[None, :]
        tap = tl.load(source, mask=here[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        if back > 0:
            position = begin + offset - back
            carried = (place < count) & (offset < back) & (position >= 0)
            old = ring + channel[None, :] * WIDTH + (tl.maximum(position, 0) % WIDTH)[:, None]
            tap += tl.load(old, mask=carried[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        total += tap * tl.load(weight + channel * WIDTH + column, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total *= tl.sigmoid(total)
    inside = (place < count)[:, None] & is_channel[None, :]
    target = out + token.to(tl.int64)[:, None] * num_channels + channel[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)
    if chunks is None:
        given = tl.load(x + first.to(tl.int64) * x_stride + channel, mask=is_channel, other=0.0)
        given = given.to(state.dtype.element_ty)
        tl.store(ring + channel * WIDTH + begin % WIDTH, given, mask=is_channel)
        if save_slots is not None:
            slot = tl.load(save_slots + row)
            if slot >= 0:
                saved = state + slot.to(tl.int64) * slot_stride + channel * WIDTH
                tl.store(saved + begin % WIDTH, given, mask=is_channel)
                for ago in tl.static_range(1, WIDTH - 1):
                    mask = is_channel & (begin >= ago)
                    at = tl.maximum(begin - ago, 0) % WIDTH
                    tl.store(saved + at, tl.load(ring + channel * WIDTH + at, mask=mask), mask=mask)


# grid: (rows, blocks of channels): the inputs at the end of the row's tokens, and before each save
@triton.jit
def _store_kernel(
    x,
    state,
    slots,
    starts,
    first_positions,
    chunks,
    chunk_starts,
    num_channels,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    begin = tl.load(first_positions + row)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    ring = state + tl.load(slots + row).to(tl.int64) * slot_stride + channel * WIDTH
    given = x + start.to(tl.int64) * x_stride + channel
    for entry in range(tl.load(chunk_starts + row), tl.load(chunk_starts + row + 1)):
        slot = tl.load(chunks + entry * 4 + 3)
        if slot >= 0:
            saved = state + slot.to(tl.int64) * slot_stride + channel * WIDTH
            end = tl.load(chunks + entry * 4 + 1) + tl.load(chunks + entry * 4 + 2) - start
            for back in tl.static_range(1, WIDTH):
                offset = end - back
                position = begin + offset
                at = tl.maximum(position, 0) % WIDTH
                new = tl.load(given + offset.to(tl.int64) * x_stride, mask=is_channel & (offset >= 0), other=0.0)
                old = tl.load(ring + at, mask=is_channel & (offset < 0) & (position >= 0), other=0.0)
                found = tl.where(offset >= 0, new.to(state.dtype.element_ty), old)
                tl.store(saved + at, found, mask=is_channel & (position >= 0))
    # earlier inputs lie in their columns already
    for ago in tl.static_range(1, WIDTH):
        mask = is_channel & (count >= ago)
        last = tl.maximum(count - ago, 0)
        latest = tl.load(given + last.to(tl.int64) * x_stride, mask=mask, other=0.0)
        tl.store(ring + (begin + last) % WIDTH, latest.to(state.dtype.element_ty), mask=mask)
