"""One token per row on CUDA: convolution, norms, gates, recurrence and gated norm of a layer in one launch.

A program computes a value head, or with few rows some of its columns. Programs that share a head join for the norm of
its output: the one that finishes last reads what the others have made. The convolution's ring is written in the same
launch: the column of the new input is read by no program.

The states and the ring are those of an earlier step and are read before the kernel waits for the one before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.delta_rule.reference import L2_EPS, DeltaWeights
from slipstream.ops.delta_rule.triton.elementwise import log_decay
from slipstream.ops.delta_rule.triton.verify import delta_verify
from slipstream.ops.linear.triton.epilogue import counters
from slipstream.ops.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.recurrent_steps import RecurrentSteps

_MANY_PROGRAMS = 264  # two for each SM of an H200


def delta_decode(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    steps: RecurrentSteps,
    replay: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, which describes the arguments."""
    if replay is not None:
        return delta_verify(qkv, z, b, a, weights, conv_state, state, steps, replay)
    num_rows = len(qkv)
    heads, key_dim, dim = state.shape[1:]
    key_size = (qkv.shape[1] - heads * dim) // 2
    width = weights.conv.shape[1]
    assert qkv.stride(1) == z.stride(1) == a.stride(1) == b.stride(1) == 1 and a.stride(0) == b.stride(0)
    assert weights.conv.is_contiguous() and conv_state.stride()[1:] == (width, 1)
    assert state.stride()[1:] == (key_dim * dim, dim, 1)
    out = torch.empty((num_rows, heads * dim), dtype=z.dtype, device=z.device)
    block = max(16, triton.next_power_of_2(dim))
    splits = num_splits(num_rows * heads, block)
    made = arrived = None
    if splits > 1:
        arrived = counters(weights.conv)
        splits = splits if num_rows * heads <= len(arrived) else 1
    if splits > 1:
        made = torch.empty((num_rows, heads, dim), dtype=torch.float32, device=z.device)
    # more columns at once spill registers
    halves = 2 if splits == 1 and block > 64 else 1
    _decode_kernel[(num_rows, heads, splits)](
        qkv,
        z,
        b,
        a,
        *weights[:4],
        conv_state,
        state,
        out,
        made,
        arrived,
        steps.slots,
        steps.first_positions,
        steps.save_slots,
        weights.eps,
        qkv.stride(0),
        z.stride(0),
        a.stride(0),
        conv_state.stride(0),
        state.stride(0),
        HEADS=heads,
        GROUP=heads // (key_size // key_dim),
        KEY_SIZE=key_size,
        KEY_DIM=key_dim,
        DIM=dim,
        WIDTH=width,
        SCALE=key_dim**-0.5,
        L2_EPS=L2_EPS,
        KEY_BLOCK=triton.next_power_of_2(key_dim),
        BLOCK=block // splits // halves,
        WHOLE=block,
        SPLITS=splits,
        HALVES=halves,
        num_warps=2,
        **dependent(z.device, num_rows),
    )
    return out


def num_splits(num_heads: int, block: int) -> int:
    """Programs that share a head. `num_heads`: of all rows."""
    return next(n for n in (4, 2, 1) if n == 1 or (num_heads * n <= _MANY_PROGRAMS and block // n >= 16))


# grid: (rows, value heads, parts of the value columns)
@triton.jit
def _decode_kernel(
    qkv,
    z,
    b,
    a,
    conv,
    a_log,
    dt_bias,
    norm,
    conv_state,
    state,
    out,
    made,
    arrived,
    slots,
    first_positions,
    save_slots,
    eps,
    qkv_stride,
    z_stride,
    gate_stride,
    ring_stride,
    slot_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    L2_EPS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    HALVES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    dim = tl.arange(0, KEY_BLOCK)
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_dim = dim < KEY_DIM
    position = tl.load(first_positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    if save_slots is not None:
        saved = tl.load(save_slots + row).to(tl.int64)
    else:
        saved = slot * 0 - 1
    matrix = state + slot * slot_stride + head * (KEY_DIM * DIM)
    save_matrix = state + tl.maximum(saved, 0) * slot_stride + head * (KEY_DIM * DIM)
    held = _read_state(matrix, dim, column, position, KEY_DIM, DIM)
    ring = conv_state + slot * ring_stride
    save_ring = conv_state + tl.maximum(saved, 0) * ring_stride
    query_channel = (head // GROUP) * KEY_DIM + dim
    key_channel = KEY_SIZE + query_channel
    value_channel = 2 * KEY_SIZE + head * DIM
    query = _past(conv, ring, query_channel, is_dim, position, WIDTH)
    key = _past(conv, ring, key_channel, is_dim, position, WIDTH)
    value = _past(conv, ring, value_channel + column, column < DIM, position, WIDTH)
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)

    wait_for_previous(DEPENDENT)
    given = qkv + row * qkv_stride
    # one program of those that share a key head writes its channels
    first = (head % GROUP == 0) & (part == 0)
    query = _present(query, given, conv, ring, save_ring, query_channel, is_dim, first, position, saved, WIDTH)
    key = _present(key, given, conv, ring, save_ring, key_channel, is_dim, first, position, saved, WIDTH)
    query *= tl.rsqrt(tl.sum(query * query, 0) + L2_EPS) * SCALE
    key *= tl.rsqrt(tl.sum(key * key, 0) + L2_EPS)
    decay = tl.exp(log_decay(tl.load(a + row * gate_stride + head).to(tl.float32), rate, bias))
    strength = tl.sigmoid(tl.load(b + row * gate_stride + head).to(tl.float32))
    channel = value_channel + column
    value = _present(value, given, conv, ring, save_ring, channel, column < DIM, True, position, saved, WIDTH)
    result = _advance(held, key, query, value, decay, strength, matrix, save_matrix, saved, dim, column, KEY_DIM, DIM)

    at = row * HEADS + head
    gate = z + row * z_stride + head * DIM
    target = out + at * DIM
    if SPLITS > 1:
        tl.store(made + at * DIM + column, result, mask=column < DIM)
        # every thread's stores are made before one of them reports
        tl.debug_barrier()
        before = tl.atomic_add(arrived + at, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if before == SPLITS - 1:
            every = tl.arange(0, WHOLE)
            joined = tl.load(made + at * DIM + every, mask=every < DIM, other=0.0, cache_modifier=".cg")
            _finish(joined, tl.rsqrt(tl.sum(joined * joined, 0) / DIM + eps), every, gate, norm, target, DIM)
            tl.store(arrived + at, 0)
    elif HALVES == 2:
        other = column + BLOCK
        held = _read_state(matrix, dim, other, position, KEY_DIM, DIM)
        channel = value_channel + other
        value = _past(conv, ring, channel, other < DIM, position, WIDTH)
        value = _present(value, given, conv, ring, save_ring, channel, other < DIM, True, position, saved, WIDTH)
        rest = _advance(held, key, query, value, decay, strength, matrix, save_matrix, saved, dim, other, KEY_DIM, DIM)
        scale = tl.rsqrt((tl.sum(result * result, 0) + tl.sum(rest * rest, 0)) / DIM + eps)
        _finish(result, scale, column, gate, norm, target, DIM)
        _finish(rest, scale, other, gate, norm, target, DIM)
    else:
        _finish(result, tl.rsqrt(tl.sum(result * result, 0) / DIM + eps), column, gate, norm, target, DIM)


@triton.jit
def _read_state(matrix, dim, column, position, KEY_DIM: tl.constexpr, DIM: tl.constexpr):
    """Some columns of the state; zeros at position 0."""
    mask = (dim < KEY_DIM)[:, None] & (column < DIM)[None, :] & (position > 0)
    return tl.load(matrix + dim[:, None] * DIM + column[None, :], mask=mask, other=0.0)


@triton.jit
def _advance(
    held,
    key,
    query,
    value,
    decay,
    strength,
    matrix,
    save_matrix,
    saved,
    dim,
    column,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """The recurrence on some columns: stores the new state, returns the output. It is 0 in columns past the last."""
    held *= decay
    delta = strength * (value - tl.sum(held * key[:, None], 0))
    held += key[:, None] * delta[None, :]
    mask = (dim < KEY_DIM)[:, None] & (column < DIM)[None, :]
    offset = dim[:, None] * DIM + column[None, :]
    tl.store(matrix + offset, held, mask=mask)
    if saved >= 0:
        tl.store(save_matrix + offset, held, mask=mask)
    return tl.sum(held * query[:, None], 0)


@triton.jit
def _past(conv, ring, channel, is_channel, position, WIDTH: tl.constexpr):
    """The convolution of the inputs before this token."""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(1, WIDTH):
        mask = is_channel & (position >= back)
        old = tl.load(ring + channel * WIDTH + (position + (WIDTH - back)) % WIDTH, mask=mask, other=0.0)
        weight = tl.load(conv + channel * WIDTH + (WIDTH - 1 - back), mask=is_channel, other=0.0)
        total += old.to(tl.float32) * weight.to(tl.float32)
    return total


@triton.jit
def _present(total, given, conv, ring, save_ring, channel, is_channel, writes, position, saved, WIDTH: tl.constexpr):
    """silu(convolution), of `_past` and this token's input, which goes to the ring if the program `writes`."""
    new = tl.load(given + channel, mask=is_channel, other=0.0)
    weight = tl.load(conv + channel * WIDTH + (WIDTH - 1), mask=is_channel, other=0.0)
    total += new.to(tl.float32) * weight.to(tl.float32)
    new = new.to(ring.dtype.element_ty)
    is_written = is_channel & writes
    tl.store(ring + channel * WIDTH + position % WIDTH, new, mask=is_written)
    if saved >= 0:
        tl.store(save_ring + channel * WIDTH + position % WIDTH, new, mask=is_written)
        for back in tl.static_range(1, WIDTH - 1):
            mask = is_written & (position >= back)
            at = channel * WIDTH + (position + (WIDTH - back)) % WIDTH
            tl.store(save_ring + at, tl.load(ring + at, mask=mask), mask=mask)
    return total * tl.sigmoid(total)


@triton.jit
def _finish(result, scale, column, gate, norm, out, DIM: tl.constexpr):
    """Stores the normed output of a head times silu(gate), some columns of it."""
    mask = column < DIM
    opened = tl.load(gate + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
    result = result * scale * factor * (opened * tl.sigmoid(opened))
    tl.store(out + column, result.to(out.dtype.element_ty), mask=mask)
