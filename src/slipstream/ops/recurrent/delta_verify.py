"""Gated delta rule with drafts on CUDA: accepted tokens are replayed, then a row's draws are computed in order.

A program keeps some value columns of one head's state in registers: it reads and writes them once per step, however
many tokens it replays and draws. q, k and v of replayed tokens are convolved again from the ring of inputs, with the
arithmetic of the plain decode kernel, so the state is the one that a step without drafts would have. A first token that
the state has seen decays and updates nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.elementwise.norm_triton import gated_rms_norm
from slipstream.ops.recurrent.delta_parts import log_decay
from slipstream.ops.recurrent.delta_rule import L2_EPS, DeltaWeights
from slipstream.ops.recurrent.steps import RecurrentSteps

_COLUMNS = 32  # value columns of a program


def delta_verify(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    steps: RecurrentSteps,
    replay: torch.Tensor,
) -> torch.Tensor:
    """`delta_decode` in an engine with drafts."""
    heads, dim = state.shape[1], state.shape[3]
    assert qkv.stride(1) == z.stride(1) == a.stride(1) == b.stride(1) == 1 and a.stride(0) == b.stride(0)
    made = torch.empty((len(qkv), heads, dim), dtype=torch.float32, device=z.device)
    _launch((qkv, b, a, made), weights, conv_state, state, steps, replay, (qkv.stride(0), a.stride(0)))
    return gated_rms_norm(made, z.unflatten(1, (heads, dim)), weights.norm, weights.eps).flatten(1)


def delta_replay_(
    state: torch.Tensor,
    conv_state: torch.Tensor,
    replay: torch.Tensor,
    weights: DeltaWeights,
    steps: RecurrentSteps,
) -> None:
    """As the reference, which describes the arguments."""
    _launch((None, None, None, None), weights, conv_state, state, steps, replay, (0, 0))


def _launch(
    tokens: tuple[torch.Tensor | None, ...],
    weights: DeltaWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    steps: RecurrentSteps,
    replay: torch.Tensor,
    token_strides: tuple[int, int],
) -> None:
    """`tokens`: qkv, b, a and the output of the step's tokens; None: the step only replays. `token_strides`: of qkv, of
    a and b."""
    heads, key_dim, dim = state.shape[1:]
    key_size = (conv_state.shape[1] - heads * dim) // 2
    width, ring = weights.conv.shape[1], conv_state.shape[2]
    assert replay[0].is_contiguous() and replay.shape[2] == 2 * heads
    assert weights.conv.is_contiguous() and conv_state.stride()[1:] == (ring, 1)
    assert state.stride()[1:] == (key_dim * dim, dim, 1)
    block = min(_COLUMNS, max(16, triton.next_power_of_2(dim)))
    _verify_kernel[(len(steps.slots), heads, triton.cdiv(dim, block))](
        tokens,
        weights[:3],
        (conv_state, state, replay),
        steps.drafted_rows,
        token_strides,
        (conv_state.stride(0), state.stride(0), replay.stride(0)),
        HEADS=heads,
        GROUP=heads // (key_size // key_dim),
        KEY_SIZE=key_size,
        KEY_DIM=key_dim,
        DIM=dim,
        WIDTH=width,
        RING=ring,
        REPLAY=replay.shape[1],
        SCALE=key_dim**-0.5,
        L2_EPS=L2_EPS,
        KEY_BLOCK=triton.next_power_of_2(key_dim),
        BLOCK=block,
        num_warps=2 if block <= 32 else 4,
    )


# grid: (draws, value heads, blocks of value columns); only the first draw of each row has work
@triton.jit
def _verify_kernel(
    tokens,
    weights,
    stored,
    rows,
    token_strides,
    slot_strides,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    SCALE: tl.constexpr,
    L2_EPS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    qkv, b, a, out = tokens
    conv, a_log, dt_bias = weights
    conv_state, state, replay = stored
    slots, first_positions, bases, counts, save_slots, save_positions = rows
    qkv_stride, gate_stride = token_strides
    ring_stride, slot_stride, replay_stride = slot_strides
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(first_positions + row)
    base = tl.load(bases + row)
    if qkv is not None:
        count = tl.load(counts + row)
        if count == 0:
            return
    else:
        count = 0
        if base >= first:
            return
    dim = tl.arange(0, KEY_BLOCK)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dim < KEY_DIM
    is_column = column < DIM
    is_inside = is_dim[:, None] & is_column[None, :]
    cells = head * (KEY_DIM * DIM) + dim[:, None] * DIM + column[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    saved = tl.load(save_slots + row).to(tl.int64)
    border = tl.load(save_positions + row)
    own = state + slot * slot_stride + cells
    current = tl.load(own, mask=is_inside & (base > 0), other=0.0)
    ring = conv_state + slot * ring_stride
    gates = replay + slot * replay_stride
    query_channel = (head // GROUP) * KEY_DIM + dim
    key_channel = KEY_SIZE + query_channel
    value_channel = 2 * KEY_SIZE + head * DIM + column
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)

    for position in range(base, first):
        key = _recall(conv, ring, key_channel, is_dim, position, WIDTH, RING)
        value = _recall(conv, ring, value_channel, is_column, position, WIDTH, RING)
        entry = gates + (position % REPLAY) * (2 * HEADS) + head
        current = _advance(current, key, value, tl.load(entry), tl.load(entry + HEADS), rate, bias, True, L2_EPS)
        if (saved >= 0) & (position + 1 == border):
            tl.store(state + saved * slot_stride + cells, current, mask=is_inside)
    if count != 1:
        tl.store(own, current, mask=is_inside)

    if qkv is not None:
        # one program of those that share a key head writes its channels
        writes = is_dim & (head % GROUP == 0) & (tl.program_id(2) == 0)
        given = qkv + row * qkv_stride
        if saved >= 0:
            target = conv_state + saved * ring_stride
            _save(given, ring, target, query_channel, writes, first, border, WIDTH, RING)
            _save(given, ring, target, key_channel, writes, first, border, WIDTH, RING)
            _save(given, ring, target, value_channel, is_column, first, border, WIDTH, RING)
        for index in range(count):
            position = first + index
            now = given + index * qkv_stride
            query = _present(conv, ring, now, qkv_stride, query_channel, is_dim, position, index, WIDTH, RING)
            key = _present(conv, ring, now, qkv_stride, key_channel, is_dim, position, index, WIDTH, RING)
            value = _present(conv, ring, now, qkv_stride, value_channel, is_column, position, index, WIDTH, RING)
            gate = (row + index) * gate_stride + head
            strength = tl.load(b + gate)
            decay = tl.load(a + gate)
            current = _advance(current, key, value, strength, decay, rate, bias, position >= base, L2_EPS)
            query *= tl.rsqrt(tl.sum(query * query, 0) + L2_EPS) * SCALE
            tl.store(
                out + ((row + index) * HEADS + head) * DIM + column, tl.sum(current * query[:, None], 0), mask=is_column
            )
            _remember(now, ring, query_channel, writes, position, RING)
            _remember(now, ring, key_channel, writes, position, RING)
            _remember(now, ring, value_channel, is_column, position, RING)
            if (count > 1) & (tl.program_id(2) == 0):
                entry = gates + (position % REPLAY) * (2 * HEADS) + head
                tl.store(entry, strength.to(replay.dtype.element_ty))
                tl.store(entry + HEADS, decay.to(replay.dtype.element_ty))
        if count == 1:
            tl.store(own, current, mask=is_inside)
            if (saved >= 0) & (first + 1 == border):
                tl.store(state + saved * slot_stride + cells, current, mask=is_inside)


@triton.jit
def _advance(current, key, value, strength, decay, rate, bias, is_new, L2_EPS: tl.constexpr):
    """The state after one token, of its convolved key and value and the inputs of its gates. The token of a state that
    has seen it is not new."""
    key *= tl.rsqrt(tl.sum(key * key, 0) + L2_EPS)
    current *= tl.exp(tl.where(is_new, log_decay(decay.to(tl.float32), rate, bias), 0.0))
    share = tl.where(is_new, tl.sigmoid(strength.to(tl.float32)), 0.0)
    delta = share * (value - tl.sum(current * key[:, None], 0))
    return current + key[:, None] * delta[None, :]


@triton.jit
def _recall(conv, ring, channel, is_channel, position, WIDTH: tl.constexpr, RING: tl.constexpr):
    """silu(convolution) of a token whose inputs are all in the ring."""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(1, WIDTH):
        mask = is_channel & (position >= back)
        old = tl.load(ring + channel * RING + (position + (RING - back)) % RING, mask=mask, other=0.0)
        weight = tl.load(conv + channel * WIDTH + (WIDTH - 1 - back), mask=is_channel, other=0.0)
        total += old.to(tl.float32) * weight.to(tl.float32)
    new = tl.load(ring + channel * RING + position % RING, mask=is_channel, other=0.0)
    weight = tl.load(conv + channel * WIDTH + (WIDTH - 1), mask=is_channel, other=0.0)
    total += new.to(tl.float32) * weight.to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit
def _present(conv, ring, now, stride, channel, is_channel, position, index, WIDTH: tl.constexpr, RING: tl.constexpr):
    """silu(convolution) of a token of the step, of which `index` tokens of its row come before it."""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(1, WIDTH):
        mask = is_channel & (position >= back)
        old = tl.load(ring + channel * RING + (position + (RING - back)) % RING, mask=mask & (index < back), other=0.0)
        here = tl.load(now - back * stride + channel, mask=mask & (index >= back), other=0.0)
        weight = tl.load(conv + channel * WIDTH + (WIDTH - 1 - back), mask=is_channel, other=0.0)
        total += tl.where(index < back, old.to(tl.float32), here.to(tl.float32)) * weight.to(tl.float32)
    new = tl.load(now + channel, mask=is_channel, other=0.0)
    weight = tl.load(conv + channel * WIDTH + (WIDTH - 1), mask=is_channel, other=0.0)
    total += new.to(tl.float32) * weight.to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit
def _remember(now, ring, channel, writes, position, RING: tl.constexpr):
    """The input of a token goes to its column of the ring, which no program reads in this step."""
    new = tl.load(now + channel, mask=writes, other=0.0)
    tl.store(ring + channel * RING + position % RING, new.to(ring.dtype.element_ty), mask=writes)


@triton.jit
def _save(given, ring, target, channel, writes, first, border, WIDTH: tl.constexpr, RING: tl.constexpr):
    """Copies the inputs before `border`, of which the last may be the row's first token of the step."""
    new = tl.load(given + channel, mask=writes, other=0.0).to(ring.dtype.element_ty)
    for back in tl.static_range(1, WIDTH):
        position = border - back
        at = channel * RING + tl.maximum(position, 0) % RING
        old = tl.load(ring + at, mask=writes & (position >= 0) & (position < first), other=0.0)
        tl.store(target + at, tl.where(position == first, new, old), mask=writes & (position >= 0))
