"""One token per row on CUDA, for the fewest rows: a program has a quarter of a value head's columns.

What does not depend on this token is loaded and computed before the kernel waits for the one before it: state, kept
updates and ring are those of an earlier step. The kept updates (see `decode.py`) are added to the state there, so that
few operations follow the wait. The sums over the key dimension are of products with key and query before their norms:
two exchanges between warps make all of them. States and inputs are stored after the join for the norm of the output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.platform.pdl import release_next, wait_for_previous


# grid: (rows, value heads, parts of the value columns)
@triton.jit
def part_kernel(
    tokens,
    weights,
    stored,
    results,
    rows,
    token_strides,
    slot_strides,
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
    PERIOD: tl.constexpr,
    ENTRY: tl.constexpr,
    DEFERRED: tl.constexpr,  # the next kernel starts after the wait: its loads of weights would delay this one's
    DEPENDENT: tl.constexpr,
):
    qkv, z, b, a = tokens
    conv, a_log, dt_bias, norm, eps = weights
    conv_state, state, deferred = stored
    out, made, arrived = results
    slots, first_positions, seen_positions, save_slots = rows
    qkv_stride, z_stride, gate_stride = token_strides
    ring_stride, slot_stride, deferred_stride = slot_strides
    if not DEFERRED:
        release_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    dim = tl.arange(0, KEY_BLOCK)
    column = part * BLOCK + tl.arange(0, BLOCK)
    every = tl.arange(0, WHOLE)
    is_dim, is_column = dim < KEY_DIM, column < DIM
    position = tl.load(first_positions + row)
    num_seen = tl.load(seen_positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    if save_slots is not None:
        saved = tl.load(save_slots + row).to(tl.int64)
    else:
        saved = slot * 0 - 1
    ring = conv_state + slot * ring_stride
    query_channel = (head // GROUP) * KEY_DIM + dim
    key_channel = KEY_SIZE + query_channel
    value_channel = 2 * KEY_SIZE + head * DIM + column
    query, query_tap = past_inputs(conv, ring, query_channel, is_dim, position, WIDTH)
    key, key_tap = past_inputs(conv, ring, key_channel, is_dim, position, WIDTH)
    value, value_tap = past_inputs(conv, ring, value_channel, is_column, position, WIDTH)
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    factor = tl.load(norm + every, mask=every < DIM, other=0.0).to(tl.float32)
    matrix = state + slot * slot_stride + head * (KEY_DIM * DIM)
    current = read_state(matrix, dim, column, num_seen, KEY_DIM, DIM)
    updates = state
    before = 0.0  # logarithm of the stored state's decay
    if PERIOD > 1:
        updates = deferred + slot * deferred_stride + head * ((PERIOD - 1) * ENTRY)
        kept = tl.maximum(position - num_seen, 0)
        current, before = _with_kept_updates(
            current, updates, dim, column, position % PERIOD, kept, KEY_DIM, DIM, PERIOD, ENTRY
        )

    wait_for_previous(DEPENDENT)
    if DEFERRED:
        release_next(DEPENDENT)
    given = qkv + row * qkv_stride
    # volatile: otherwise these are requested only when the first ones have arrived
    new_query = tl.load(given + query_channel, mask=is_dim, other=0.0)
    new_key = tl.load(given + key_channel, mask=is_dim, other=0.0)
    new_value = tl.load(given + value_channel, mask=is_column, other=0.0, volatile=True)
    opened = tl.load(z + row * z_stride + head * DIM + every, mask=every < DIM, other=0.0).to(tl.float32)
    decay = tl.load(a + row * gate_stride + head, volatile=True).to(tl.float32)
    strength = tl.load(b + row * gate_stride + head, volatile=True).to(tl.float32)
    query = convolved(query, new_query, query_tap)
    key = convolved(key, new_key, key_tap)
    value = convolved(value, new_value, value_tap)
    found, read = tl.split(tl.sum(tl.join(current * key[:, None], current * query[:, None]), 0))
    overlap = key * query
    products = tl.join(tl.join(key * key, query * query), tl.join(overlap, overlap))
    squares, overlaps = tl.split(tl.sum(products, 0))
    key_square, query_square = tl.split(squares)
    overlap, _ = tl.split(overlaps)
    key_scale = tl.rsqrt(key_square + L2_EPS)
    query_scale = tl.rsqrt(query_square + L2_EPS) * SCALE
    is_seen = num_seen > position
    decay = tl.where(is_seen, 0.0, log_decay(decay, rate, bias))
    strength = tl.where(is_seen, 0.0, tl.sigmoid(strength))
    now = tl.exp(decay)
    delta = strength * (value - (now * key_scale) * found)
    result = query_scale * (now * read + (key_scale * overlap) * delta)
    factor *= opened * tl.sigmoid(opened)

    at = row * HEADS + head
    tl.store(made + at * DIM + column, result, mask=is_column)
    # every thread's stores are made before one of them reports
    tl.debug_barrier()
    arrivals = tl.atomic_add(arrived + at, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if arrivals == SPLITS - 1:
        joined = tl.load(made + at * DIM + every, mask=every < DIM, other=0.0, cache_modifier=".cg")
        joined *= tl.rsqrt(tl.sum(joined * joined, 0) / DIM + eps) * factor
        tl.store(out + at * DIM + every, joined.to(out.dtype.element_ty), mask=every < DIM)
        tl.store(arrived + at, 0)

    key *= key_scale
    last = position % PERIOD
    if last == PERIOD - 1:
        current = now * current + key[:, None] * delta[None, :]
        mask = is_dim[:, None] & is_column[None, :]
        offset = dim[:, None] * DIM + column[None, :]
        tl.store(matrix + offset, current, mask=mask)
        if saved >= 0:
            save_matrix = state + saved * slot_stride + head * (KEY_DIM * DIM)
            tl.store(save_matrix + offset, current, mask=mask)
    else:
        entry = updates + last * ENTRY
        if part == 0:
            tl.store(entry + dim, key, mask=is_dim)
            tl.store(entry + KEY_DIM + DIM, before + decay)
        tl.store(entry + KEY_DIM + column, delta, mask=is_column)
    save_ring = conv_state + tl.maximum(saved, 0) * ring_stride
    # one program of those that share a key head writes its channels
    is_written = is_dim & (head % GROUP == 0) & (part == 0)
    keep_input(new_value, ring, save_ring, value_channel, is_column, position, saved, WIDTH)
    keep_input(new_query, ring, save_ring, query_channel, is_written, position, saved, WIDTH)
    keep_input(new_key, ring, save_ring, key_channel, is_written, position, saved, WIDTH)


@triton.jit
def _with_kept_updates(
    current,
    updates,
    dim,
    column,
    last,
    kept,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PERIOD: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Some columns of the state after the last `kept` tokens, and the logarithm of the stored state's decay since."""
    SUM: tl.constexpr = KEY_DIM + DIM  # where an entry has the sum of log decays since the state was stored
    before = tl.load(updates + (last - 1) * ENTRY + SUM, mask=kept > 0, other=0.0)
    current *= tl.exp(before)
    for index in tl.static_range(PERIOD - 1):
        is_kept = (index < last) & (index >= last - kept)
        entry = updates + index * ENTRY
        since = tl.exp(before - tl.load(entry + SUM, mask=is_kept, other=0.0))
        old = since * tl.load(entry + dim, mask=(dim < KEY_DIM) & is_kept, other=0.0)
        correction = tl.load(entry + KEY_DIM + column, mask=(column < DIM) & is_kept, other=0.0)
        current += old[:, None] * correction[None, :]
    return current, before


# The short convolution of one token inside a decode kernel: its earlier inputs are in a ring, by position.


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


# Reads what `decode.py` has stored of a value head: its state, and the updates that were kept since.


@triton.jit
def read_state(matrix, dim, column, num_seen, KEY_DIM: tl.constexpr, DIM: tl.constexpr):
    """Some columns of the state; zeros if it has seen no token."""
    mask = (dim < KEY_DIM)[:, None] & (column < DIM)[None, :] & (num_seen > 0)
    return tl.load(matrix + dim[:, None] * DIM + column[None, :], mask=mask, other=0.0)


@triton.jit
def _kept_indices(position, kept, PERIOD: tl.constexpr):
    """[PERIOD] indices of updates, and whether each is of one of the last `kept` tokens."""
    index = tl.arange(0, PERIOD)
    last = position % PERIOD
    return index, (index < last) & (index >= last - kept)


@triton.jit
def read_kept(
    updates,
    dim,
    position,
    kept,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PERIOD: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Of the last `kept` tokens: keys [PERIOD, key dim], and sums of log decays since the state was stored [PERIOD].
    Others are 0."""
    index, is_kept = _kept_indices(position, kept, PERIOD)
    entry = updates + index * ENTRY
    keys = tl.load(entry[:, None] + dim[None, :], mask=is_kept[:, None] & (dim < KEY_DIM)[None, :], other=0.0)
    return keys, tl.load(entry + KEY_DIM + DIM, mask=is_kept, other=0.0)


@triton.jit
def read_corrections(
    updates,
    column,
    position,
    kept,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PERIOD: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Some columns of the corrections of the last `kept` tokens, [PERIOD, columns]; others are 0."""
    index, is_kept = _kept_indices(position, kept, PERIOD)
    mask = is_kept[:, None] & (column < DIM)[None, :]
    return tl.load(updates + index[:, None] * ENTRY + KEY_DIM + column[None, :], mask=mask, other=0.0)


# Gates of the delta rule on CUDA.


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, which describes the arguments."""
    num_tokens, heads = a.shape
    assert a.stride(1) == b.stride(1) == 1 and a.stride(0) == b.stride(0)
    g, beta = torch.empty((2, num_tokens, heads), dtype=torch.float32, device=a.device).unbind(0)
    block = triton.next_power_of_2(heads)
    rows = max(1, 512 // block)
    _gates_kernel[(triton.cdiv(num_tokens, rows),)](
        a, b, a_log, dt_bias, g, beta, num_tokens, a.stride(0), HEADS=heads, ROWS=rows, BLOCK=block, num_warps=4
    )
    return g, beta


# grid: (blocks of tokens,)
@triton.jit(do_not_specialize=["num_tokens"])
def _gates_kernel(
    a,
    b,
    a_log,
    dt_bias,
    g,
    beta,
    num_tokens,
    stride,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_head = head < HEADS
    mask = (token < num_tokens)[:, None] & is_head[None, :]
    source = token[:, None] * stride + head[None, :]
    target = token[:, None] * HEADS + head[None, :]
    rate = tl.load(a_log + head, mask=is_head, other=0.0)[None, :]
    bias = tl.load(dt_bias + head, mask=is_head, other=0.0)[None, :]
    decay = log_decay(tl.load(a + source, mask=mask, other=0.0).to(tl.float32), rate, bias)
    tl.store(g + target, decay, mask=mask)
    tl.store(beta + target, tl.sigmoid(tl.load(b + source, mask=mask, other=0.0).to(tl.float32)), mask=mask)


@triton.jit
def log_decay(a, a_log, dt_bias):
    """-exp(a_log) softplus(a + dt_bias); past 20 softplus is its argument, as in torch."""
    x = a + dt_bias
    soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(a_log) * soft
