"""The short convolution of one token inside a decode kernel: its earlier inputs are in a ring, by position."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def past_inputs(conv, ring, channel, is_channel, position, WIDTH: tl.constexpr):
    """The convolution of the inputs before this token, and the weight of its own."""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(1, WIDTH):
        mask = is_channel & (position >= back)
        old = tl.load(ring + channel * WIDTH + (position + (WIDTH - back)) % WIDTH, mask=mask, other=0.0)
        weight = tl.load(conv + channel * WIDTH + (WIDTH - 1 - back), mask=is_channel, other=0.0)
        total += old.to(tl.float32) * weight.to(tl.float32)
    return total, tl.load(conv + channel * WIDTH + (WIDTH - 1), mask=is_channel, other=0.0).to(tl.float32)


@triton.jit
def convolved(past, new, tap):
    """silu of the convolution with this token's input."""
    total = past + new.to(tl.float32) * tap
    return total * tl.sigmoid(total)


@triton.jit
def keep_input(new, ring, save_ring, channel, is_written, position, saved, WIDTH: tl.constexpr):
    """Stores this token's input of the convolution in the ring, and in the saved one with its last inputs."""
    new = new.to(ring.dtype.element_ty)
    tl.store(ring + channel * WIDTH + position % WIDTH, new, mask=is_written)
    if saved >= 0:
        tl.store(save_ring + channel * WIDTH + position % WIDTH, new, mask=is_written)
        for back in tl.static_range(1, WIDTH - 1):
            mask = is_written & (position >= back)
            at = channel * WIDTH + (position + (WIDTH - back)) % WIDTH
            tl.store(save_ring + at, tl.load(ring + at, mask=mask), mask=mask)
