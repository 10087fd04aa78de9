"""Mamba-2 on CUDA. Steps of one token per row: one launch, which reads and writes each state once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.recurrent_steps import RecurrentSteps
from slipstream.ops.recurrent_steps.triton import empty_outputs
from slipstream.ops.ssm.reference import SsdWeights
from slipstream.ops.ssm.triton.softplus import softplus
from slipstream.ops.ssm.triton.ssd_chunked import scan_chunks
from slipstream.ops.ssm.triton.verify import ssd_verify


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
        x,
        dt,
        b,
        c,
        *weights[:3],
        state,
        out,
        steps.slots,
        steps.first_positions,
        steps.seen_positions,
        steps.save_slots,
        weights.dt_min,
        weights.dt_max,
        x.stride(0),
        dt.stride(0),
        b.stride(0),
        c.stride(0),
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
    x,
    dt,
    b,
    c,
    a_log,
    dt_bias,
    d,
    state,
    out,
    slots,
    first_positions,
    seen_positions,
    save_slots,
    dt_min,
    dt_max,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    state_stride,
    HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_STATE: tl.constexpr,
):
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
    held = tl.load(own, mask=inside, other=0.0)
    held = tl.where(num_seen == 0, 0.0, held)
    size = softplus(tl.load(dt + row * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head))
    size = tl.minimum(tl.maximum(size, dt_min), dt_max)
    size = tl.where(num_seen > tl.load(first_positions + row), 0.0, size)  # 0 keeps the state
    group = head // HEADS_OF_GROUP * STATE + column
    now = tl.load(x + row * x_stride + head * DIM + dim, mask=is_dim, other=0.0).to(tl.float32)
    written = tl.load(b + row * b_stride + group, mask=is_column, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_stride + group, mask=is_column, other=0.0).to(tl.float32)
    held = held * tl.exp(-tl.exp(tl.load(a_log + head)) * size) + (size * now)[:, None] * written[None, :]
    made = tl.sum(held * read[None, :], 1) + tl.load(d + head) * now
    tl.store(out + (row * HEADS + head) * DIM + dim, made.to(out.dtype.element_ty), mask=is_dim)
    tl.store(own, held, mask=inside)
    if save_slots is not None:
        saved = tl.load(save_slots + row)
        if saved >= 0:
            tl.store(state + saved.to(tl.int64) * state_stride + cells, held, mask=inside)
