"""The noise that ops/sample/reference.py defines, with the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def noise_at(index, low, high):
    """uint32 noise of an index; the step key is given as two uint32 halves."""
    x = index.to(tl.uint32) + low
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) ^ high
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    x = (x ^ (x >> 16)) * tl.full([], 0x31848BAB, tl.uint32)
    return x ^ (x >> 14)


@triton.jit
def halves(key):
    """The low and the high 32 bits of a step key."""
    bits = key.to(tl.uint64)
    return (bits & 0xFFFFFFFF).to(tl.uint32), (bits >> 32).to(tl.uint32)


@triton.jit
def uniform_at(index, low, high):
    """The noise at an index as a number between 0 and 1, neither of them included."""
    u = (noise_at(index, low, high).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return tl.minimum(u, 0.99999994)  # the largest float32 below 1


@triton.jit
def exponential_at(index, low, high):
    """-log1p(-u) of the noise at an index."""
    u = uniform_at(index, low, high)
    # log1p by log: the quotient corrects the rounding of 1 - u
    w = 1.0 - u
    return tl.where(w == 1.0, u, tl.log(w) * (u / (w - 1.0)))


def noise_bits(keys: torch.Tensor, num: int) -> torch.Tensor:
    """[R] int64 step keys to [R, num] int32."""
    out = torch.empty(len(keys), num, dtype=torch.int32, device=keys.device)
    _bits_kernel[(triton.cdiv(num, _BLOCK), len(keys))](keys, out, num, BLOCK=_BLOCK)
    return out


# grid: (blocks, rows)
@triton.jit
def _bits_kernel(keys, out, num, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = halves(tl.load(keys + row))
    tl.store(out + row * num + index, noise_at(index, low, high).to(tl.int32, bitcast=True), mask=index < num)


def step_keys(row_keys: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """[R] int64 row keys and [R] int64 positions to [R] int64 step keys."""
    out = torch.empty_like(row_keys)
    _keys_kernel[(triton.cdiv(len(out), _BLOCK),)](row_keys, positions, out, len(out), PURPOSE=purpose, BLOCK=_BLOCK)
    return out


# grid: (blocks of rows,)
@triton.jit(do_not_specialize=["num"])
def _keys_kernel(row_keys, positions, out, num, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num
    row_key = tl.load(row_keys + row, mask=mask, other=0)
    step_key = step_key_of(row_key, tl.load(positions + row, mask=mask, other=0), PURPOSE)
    tl.store(out + row, step_key.to(tl.int64), mask=mask)


@triton.jit
def step_key_of(row_key, position, PURPOSE: tl.constexpr):
    """The step key of a row key at a position, as uint64."""
    step = position.to(tl.uint64) * 4 + (PURPOSE + 1)
    z = row_key.to(tl.uint64) + step * tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)
