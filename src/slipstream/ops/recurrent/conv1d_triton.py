"""Causal depthwise convolution on CUDA, in float32, rounded once.

Steps of one token per row take one launch: no token reads the column of the ring that it writes. Otherwise a second
launch writes the rings, after all programs of the first have read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.recurrent.replay import Activation
from slipstream.ops.recurrent.steps import RecurrentSteps
from slipstream.ops.recurrent.steps_triton import empty_outputs

_CHANNELS = 512  # of one program that writes rings: a step has room for more rows than it has, each with programs


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
    ring = state.shape[2]
    assert x.stride(1) == 1 and weight.is_contiguous() and state.stride()[1:] == (ring, 1)
    out = empty_outputs((num_tokens, channels), x, steps)
    if not num_tokens or not len(steps.slots):
        return out
    tile = choose_tile(channels, steps.is_single)
    blocks = triton.cdiv(channels, tile["CHANNELS"])
    rows = (steps.slots, steps.starts, steps.first_positions)
    sizes = (channels, x.stride(0), state.stride(0))
    options = {"SILU": activation == "silu", "WIDTH": width, "RING": ring}
    drafts = steps.drafts
    if steps.is_single:
        _step_kernel[(blocks, len(steps.slots))](
            x,
            weight,
            bias,
            state,
            out,
            steps.slots,
            steps.first_positions,
            None if drafts is None else drafts.offsets,
            steps.save_slots if drafts is None else drafts.save_slots,
            None if drafts is None else drafts.save_positions,
            *sizes,
            **options,
            **tile,
        )
        return out
    assert steps.chunks is not None
    _chunk_kernel[(blocks, len(steps.chunks))](
        x, weight, bias, state, out, *rows, steps.chunks, *sizes, **options, **tile
    )
    _store_kernel[(triton.cdiv(channels, _CHANNELS), len(steps.slots))](
        x,
        state,
        *rows,
        steps.chunks,
        steps.chunk_starts,
        None if drafts is None else drafts.save_slots,
        None if drafts is None else drafts.save_positions,
        *sizes,
        WIDTH=width,
        RING=ring,
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    return out


def choose_tile(channels: int, is_single: bool) -> dict[str, int]:
    """Channels of a program, tokens whose inputs it loads at once (if rows have several), and num_warps."""
    block = max(32, triton.next_power_of_2(channels))
    if is_single:
        # programs of one warp would take longer to start than to run
        block = min(512, block)
        return {"CHANNELS": block, "num_warps": max(1, block // 128)}
    # a thread has 8 channels, which 16-byte loads of 16-bit inputs need
    block = min(512, block)
    return {"TOKENS": 8, "CHANNELS": block, "num_warps": max(1, block // 128)}


# grid: (blocks of channels, chunks)
@triton.jit
def _chunk_kernel(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    starts,
    first_positions,
    chunks,
    num_channels,
    x_stride,
    slot_stride,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    entry = tl.program_id(1)
    row = tl.load(chunks + entry * 4)
    if row < 0:
        return
    first = tl.load(chunks + entry * 4 + 1)
    end = first + tl.load(chunks + entry * 4 + 2)
    start = tl.load(starts + row)
    shift = tl.load(first_positions + row) - start  # from tokens to positions
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    ring = state + tl.load(slots + row).to(tl.int64) * slot_stride + channel * RING
    factors = ()
    for column in tl.static_range(WIDTH):
        factor = tl.load(weight + channel * WIDTH + column, mask=is_channel, other=0.0)
        factors = factors + (factor.to(tl.float32),)  # type: ignore[assignment]
    added = tl.zeros((CHANNELS,), tl.float32)
    if bias is not None:
        added = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    past = ()
    for back in tl.static_range(1 - WIDTH, 0):
        given = _earlier(x, ring, channel, is_channel, first + back, start, shift, x_stride, RING)
        past = past + (given.to(tl.float32),)  # type: ignore[assignment]
    source = x + tl.cast(first, tl.int64) * x_stride + channel
    target = out + tl.cast(first, tl.int64) * num_channels + channel
    for left in range(end - first, 0, -TOKENS):
        # all loads come before the first store, which they cannot pass
        inputs = past
        for step in tl.static_range(TOKENS):
            given = tl.load(source + step * x_stride, mask=is_channel & (step < left), other=0.0)
            inputs = inputs + (given.to(tl.float32),)  # type: ignore[assignment]
        for step in tl.static_range(TOKENS):
            total = added
            for column in tl.static_range(WIDTH):
                total += inputs[step + column] * factors[column]
            if SILU:
                total = _silu(total)
            tl.store(target + step * num_channels, total.to(out.dtype.element_ty), mask=is_channel & (step < left))
        past = inputs[TOKENS:]  # type: ignore[assignment]
        source += TOKENS * x_stride
        target += TOKENS * num_channels


@triton.jit
def _earlier(x, ring, channel, is_channel, token, start, shift, x_stride, RING: tl.constexpr):
    """The input of a token, which an earlier step has computed if it lies before `start`."""
    if token >= start:
        given = tl.load(x + tl.cast(token, tl.int64) * x_stride + channel, mask=is_channel, other=0.0)
    else:
        position = token + shift
        mask = is_channel & (position >= 0)
        given = tl.load(ring + tl.maximum(position, 0) % RING, mask=mask, other=0.0).to(x.dtype.element_ty)
    return given


@triton.jit
def _silu(x):
    """exp2 flushes denormals and takes half of the instructions of exp, which count in a kernel bound by bandwidth."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * root * root


# grid: (blocks of channels, rows of one token each)
@triton.jit
def _step_kernel(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    first_positions,
    offsets,
    save_slots,
    save_positions,
    num_channels,
    x_stride,
    slot_stride,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """`offsets` and `save_positions`: only with drafts."""
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(first_positions + row)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    ring = state + tl.load(slots + row).to(tl.int64) * slot_stride + channel * RING
    given = tl.load(x + row * x_stride + channel, mask=is_channel, other=0.0)
    factor = tl.load(weight + channel * WIDTH + (WIDTH - 1), mask=is_channel, other=0.0)
    total = given.to(tl.float32) * factor.to(tl.float32)
    offset = position * 0
    if offsets is not None:
        offset = tl.load(offsets + row)
    for back in tl.static_range(1, WIDTH):
        mask = is_channel & (position >= back)
        old = tl.load(ring + (position + (RING - back)) % RING, mask=mask & (offset < back), other=0.0).to(tl.float32)
        if offsets is not None:  # inputs of the row's earlier draws: other programs write them to the ring
            here = tl.load(x + (row - back) * x_stride + channel, mask=mask & (offset >= back), other=0.0)
            old = tl.where(offset < back, old, here.to(tl.float32))
        factor = tl.load(weight + channel * WIDTH + (WIDTH - 1 - back), mask=is_channel, other=0.0)
        total += old * factor.to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    if SILU:
        total = _silu(total)
    tl.store(out + row * num_channels + channel, total.to(out.dtype.element_ty), mask=is_channel)
    given = given.to(state.dtype.element_ty)
    tl.store(ring + position % RING, given, mask=is_channel)
    if save_slots is not None:
        slot = tl.load(save_slots + row)
        if slot >= 0:
            border = position + 1
            if save_positions is not None:
                border = tl.load(save_positions + row)
            saved = state + slot.to(tl.int64) * slot_stride + channel * RING
            _save_inputs(ring, saved, is_channel, border, position, given, WIDTH, RING)


@triton.jit
def _save_inputs(ring, saved, is_channel, border, position, given, WIDTH: tl.constexpr, RING: tl.constexpr):
    """Copies the inputs before `border` to the ring `saved`; `given` is the input at `position`, which may be the
    last of them, all others are in the ring."""
    for ago in tl.static_range(1, WIDTH):
        earlier = border - ago
        at = tl.maximum(earlier, 0) % RING
        mask = is_channel & (earlier >= 0)
        old = tl.load(ring + at, mask=mask & (earlier != position), other=0.0)
        tl.store(saved + at, tl.where(earlier == position, given, old), mask=mask)


# grid: (blocks of channels, rows): the inputs at the end of the row's tokens, and before each save
@triton.jit
def _store_kernel(
    x,
    state,
    slots,
    starts,
    first_positions,
    chunks,
    chunk_starts,
    save_slots,
    save_positions,
    num_channels,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """`save_slots` and `save_positions`: only with drafts, of states before the row's tokens."""
    row = tl.program_id(1)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    if save_slots is None:  # noqa: SIM102 - known when compiled
        if count == 0:  # most rows of a captured prefill step
            return
    begin = tl.load(first_positions + row)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    ring = state + tl.load(slots + row).to(tl.int64) * slot_stride + channel * RING
    given = x + start.to(tl.int64) * x_stride + channel
    if save_slots is not None:
        slot = tl.load(save_slots + row)
        if slot >= 0:
            saved = state + slot.to(tl.int64) * slot_stride + channel * RING
            nothing = tl.zeros((CHANNELS,), state.dtype.element_ty)
            _save_inputs(ring, saved, is_channel, tl.load(save_positions + row), -1, nothing, WIDTH, RING)
    for entry in range(tl.load(chunk_starts + row), tl.load(chunk_starts + row + 1)):
        slot = tl.load(chunks + entry * 4 + 3)
        if slot >= 0:
            saved = state + slot.to(tl.int64) * slot_stride + channel * RING
            end = tl.load(chunks + entry * 4 + 1) + tl.load(chunks + entry * 4 + 2) - start
            for back in tl.static_range(1, WIDTH):
                offset = end - back
                position = begin + offset
                at = tl.maximum(position, 0) % RING
                new = tl.load(given + offset.to(tl.int64) * x_stride, mask=is_channel & (offset >= 0), other=0.0)
                old = tl.load(ring + at, mask=is_channel & (offset < 0) & (position >= 0), other=0.0)
                found = tl.where(offset >= 0, new.to(state.dtype.element_ty), old)
                tl.store(saved + at, found, mask=is_channel & (position >= 0))
    # earlier inputs lie in their columns already; as many as the width: the last position may be computed again
    for ago in tl.static_range(1, WIDTH + 1):
        mask = is_channel & (count >= ago)
        last = tl.maximum(count - ago, 0)
        latest = tl.load(given + last.to(tl.int64) * x_stride, mask=mask, other=0.0)
        tl.store(ring + (begin + last) % RING, latest.to(state.dtype.element_ty), mask=mask)
