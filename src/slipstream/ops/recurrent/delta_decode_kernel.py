"""One token per row on CUDA: convolution, norms, gates, recurrence and gated norm of a layer in one launch.

A program computes a value head, or with few rows some of its columns (with the fewest: `delta_parts.py`). Programs
that share a head join for the norm of its output: the one that finishes last reads what the others have made. The
convolution's ring is written in the same launch: the column of the new input is read by no program.

The states and the ring are those of an earlier step and are read before the kernel waits for the one before it, except
by programs that compute a whole head, half of its columns after the other.

With `deferred`, a state is stored at the last of every PERIOD positions only. The other steps read it, and keep their
token's update: key, correction and the sum of log decays. With S the stored state, F its decay since then, and c_j the
decay since update j, the present state is F S + sum of c_j k_j d_j^T. A step needs its products with k and q only,
which are sums over S and products of the kept vectors; so most steps do not write states, half of the bytes. A
position that is computed again keeps the same update again; if its state was stored, it decays and updates nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.linear.epilogue import counters
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.recurrent import delta_parts
from slipstream.ops.recurrent.delta_parts import (
    convolved,
    keep_input,
    log_decay,
    past_inputs,
    read_corrections,
    read_kept,
    read_state,
)
from slipstream.ops.recurrent.delta_rule import L2_EPS, DeltaWeights
from slipstream.ops.recurrent.delta_verify import delta_verify
from slipstream.ops.recurrent.steps import RecurrentSteps

_MAX_PROGRAMS = {4: 264, 2: 1024}  # by the number of parts of a head, measured on an H200
_COLUMNS = 64  # of the state at once, in programs with a whole head; more spill registers


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
    deferred: torch.Tensor | None = None,
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
    period, entry = (1, 0) if deferred is None else (deferred.shape[2] + 1, deferred.shape[3])
    assert deferred is None or deferred[0].is_contiguous()
    out = torch.empty((num_rows, heads * dim), dtype=z.dtype, device=z.device)
    block = max(16, triton.next_power_of_2(dim))
    splits = num_splits(num_rows * heads, block)
    made = arrived = None
    if splits > 1:
        arrived = counters(weights.conv)
        splits = splits if num_rows * heads <= len(arrived) else 1
    columns = min(block, _COLUMNS) if splits == 1 else block // splits
    if columns < block:
        made = torch.empty((num_rows, heads, dim), dtype=torch.float32, device=z.device)
    kernel, warps = (delta_parts.part_kernel, 4) if splits == 4 else (_decode_kernel, 2)
    kernel[(num_rows, heads, splits)](
        (qkv, z, b, a),
        weights,
        (conv_state, state, deferred),
        (out, made, arrived),
        steps.rows,
        (qkv.stride(0), z.stride(0), a.stride(0)),
        (conv_state.stride(0), state.stride(0), 0 if deferred is None else deferred.stride(0)),
        HEADS=heads,
        GROUP=heads // (key_size // key_dim),
        KEY_SIZE=key_size,
        KEY_DIM=key_dim,
        DIM=dim,
        WIDTH=width,
        SCALE=key_dim**-0.5,
        L2_EPS=L2_EPS,
        KEY_BLOCK=triton.next_power_of_2(key_dim),
        BLOCK=columns,
        WHOLE=block,
        SPLITS=splits,
        PERIOD=period,
        ENTRY=entry,
        DEFERRED=num_rows == 1,
        num_warps=warps,
        **dependent(z.device, num_rows),
    )
    return out


def num_splits(num_heads: int, block: int) -> int:
    """Programs that share a head. `num_heads`: of all rows."""
    fits = (n for n, most in _MAX_PROGRAMS.items() if num_heads * n <= most and block // n >= 16)
    return next(fits, 1)


# grid: (rows, value heads, parts of the value columns)
@triton.jit
def _decode_kernel(
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
    is_dim = dim < KEY_DIM
    position = tl.load(first_positions + row)
    num_seen = tl.load(seen_positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    if save_slots is not None:
        saved = tl.load(save_slots + row).to(tl.int64)
    else:
        saved = slot * 0 - 1
    matrix = state + slot * slot_stride + head * (KEY_DIM * DIM)
    save_matrix = state + tl.maximum(saved, 0) * slot_stride + head * (KEY_DIM * DIM)
    kept = position * 0
    updates = state
    if deferred is not None:
        kept = tl.maximum(position - num_seen, 0)
        updates = deferred + slot * deferred_stride + head * ((PERIOD - 1) * ENTRY)
    IS_WHOLE: tl.constexpr = SPLITS == 1 and BLOCK < WHOLE
    if not IS_WHOLE:
        current = read_state(matrix, dim, column, num_seen, KEY_DIM, DIM)
        corrections = read_corrections(updates, column, position, kept, KEY_DIM, DIM, PERIOD, ENTRY)
    keys, decays = read_kept(updates, dim, position, kept, KEY_DIM, DIM, PERIOD, ENTRY)
    ring = conv_state + slot * ring_stride
    save_ring = conv_state + tl.maximum(saved, 0) * ring_stride
    query_channel = (head // GROUP) * KEY_DIM + dim
    key_channel = KEY_SIZE + query_channel
    value_channel = 2 * KEY_SIZE + head * DIM
    query, query_tap = past_inputs(conv, ring, query_channel, is_dim, position, WIDTH)
    key, key_tap = past_inputs(conv, ring, key_channel, is_dim, position, WIDTH)
    if not IS_WHOLE:
        value, value_tap = past_inputs(conv, ring, value_channel + column, column < DIM, position, WIDTH)
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    every = tl.arange(0, WHOLE)
    gate = z + row * z_stride + head * DIM + every
    if not IS_WHOLE:
        factor = tl.load(norm + every, mask=every < DIM, other=0.0).to(tl.float32)

    wait_for_previous(DEPENDENT)
    if DEFERRED:
        release_next(DEPENDENT)
    given = qkv + row * qkv_stride
    # one program of those that share a key head writes its channels
    is_written = is_dim & (head % GROUP == 0) & (part == 0)
    # a load after a store waits until what is stored has been loaded: parts of a head load everything first
    new_query = tl.load(given + query_channel, mask=is_dim, other=0.0)
    if IS_WHOLE:
        keep_input(new_query, ring, save_ring, query_channel, is_written, position, saved, WIDTH)
    new_key = tl.load(given + key_channel, mask=is_dim, other=0.0)
    if IS_WHOLE:
        keep_input(new_key, ring, save_ring, key_channel, is_written, position, saved, WIDTH)
    else:
        new_value = tl.load(given + value_channel + column, mask=column < DIM, other=0.0)
        opened = tl.load(gate, mask=every < DIM, other=0.0).to(tl.float32)
    decay = tl.load(a + row * gate_stride + head).to(tl.float32)
    strength = tl.load(b + row * gate_stride + head).to(tl.float32)
    query = convolved(query, new_query, query_tap)
    key = convolved(key, new_key, key_tap)
    query *= tl.rsqrt(tl.sum(query * query, 0) + L2_EPS) * SCALE
    key *= tl.rsqrt(tl.sum(key * key, 0) + L2_EPS)
    decay = log_decay(decay, rate, bias)
    strength = tl.sigmoid(strength)
    is_seen = num_seen > position
    decay = tl.where(is_seen, 0.0, decay)
    strength = tl.where(is_seen, 0.0, strength)
    # decays of the stored state and of kept updates up to this token, and the products of kept keys
    before = tl.sum(tl.where(tl.arange(0, PERIOD) == position % PERIOD - 1, decays, 0.0), 0)
    since = tl.exp(before - decays)
    by_key = since * tl.sum(keys * key[None, :], 1)
    by_query = since * tl.sum(keys * query[None, :], 1)
    overlap = tl.sum(query * key, 0)
    if PERIOD > 1 and (part == 0) & (position % PERIOD < PERIOD - 1):
        entry = updates + (position % PERIOD) * ENTRY
        tl.store(entry + dim, key, mask=is_dim)
        tl.store(entry + KEY_DIM + DIM, before + decay)

    at = row * HEADS + head
    target = out + at * DIM + every
    if IS_WHOLE:
        squares = 0.0
        for begin in range(0, WHOLE, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            current = read_state(matrix, dim, column, num_seen, KEY_DIM, DIM)
            corrections = read_corrections(updates, column, position, kept, KEY_DIM, DIM, PERIOD, ENTRY)
            channel = value_channel + column
            value, value_tap = past_inputs(conv, ring, channel, column < DIM, position, WIDTH)
            new_value = tl.load(given + channel, mask=column < DIM, other=0.0)
            value = convolved(value, new_value, value_tap)
            keep_input(new_value, ring, save_ring, channel, column < DIM, position, saved, WIDTH)
            result = _advance(
                current, corrections, by_key, by_query, overlap, key, query, value, before, decay, strength, matrix,
                save_matrix, saved, updates, position, kept, dim, column, KEY_DIM, DIM, PERIOD, ENTRY,
            )  # fmt: skip
            squares += tl.sum(result * result, 0)
            tl.store(made + at * DIM + column, result, mask=column < DIM)
        tl.debug_barrier()  # other threads of the program have made some of the columns
        whole = tl.load(made + at * DIM + every, mask=every < DIM, other=0.0)
        factor = tl.load(norm + every, mask=every < DIM, other=0.0).to(tl.float32)
        opened = tl.load(gate, mask=every < DIM, other=0.0).to(tl.float32)
        whole *= tl.rsqrt(squares / DIM + eps) * (factor * (opened * tl.sigmoid(opened)))
        tl.store(target, whole.to(out.dtype.element_ty), mask=every < DIM)
    else:
        value = convolved(value, new_value, value_tap)
        result = _advance(
            current, corrections, by_key, by_query, overlap, key, query, value, before, decay, strength, matrix,
            save_matrix, saved, updates, position, kept, dim, column, KEY_DIM, DIM, PERIOD, ENTRY,
        )  # fmt: skip
        factor *= opened * tl.sigmoid(opened)
        if SPLITS > 1:
            tl.store(made + at * DIM + column, result, mask=column < DIM)
            # every thread's stores are made before one of them reports
            tl.debug_barrier()
            arrivals = tl.atomic_add(arrived + at, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if arrivals == SPLITS - 1:
                joined = tl.load(made + at * DIM + every, mask=every < DIM, other=0.0, cache_modifier=".cg")
                joined *= tl.rsqrt(tl.sum(joined * joined, 0) / DIM + eps) * factor
                tl.store(target, joined.to(out.dtype.element_ty), mask=every < DIM)
                tl.store(arrived + at, 0)
        else:  # the columns are all columns
            result *= tl.rsqrt(tl.sum(result * result, 0) / DIM + eps) * factor
            tl.store(target, result.to(out.dtype.element_ty), mask=every < DIM)
        keep_input(new_value, ring, save_ring, value_channel + column, column < DIM, position, saved, WIDTH)
        keep_input(new_query, ring, save_ring, query_channel, is_written, position, saved, WIDTH)
        keep_input(new_key, ring, save_ring, key_channel, is_written, position, saved, WIDTH)


@triton.jit
def _advance(
    current,
    corrections,
    by_key,
    by_query,
    overlap,
    key,
    query,
    value,
    before,
    decay,
    strength,
    matrix,
    save_matrix,
    saved,
    updates,
    position,
    kept,
    dim,
    column,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PERIOD: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """The recurrence on some columns, from the stored state and the kept updates: stores the new state or the
    correction, returns the output. It is 0 in columns past the last. `before`, `decay`: logarithms of the state's decay
    before this token and of the token's own."""
    last = position % PERIOD
    of_state, now = tl.exp(before), tl.exp(decay)
    found = of_state * tl.sum(current * key[:, None], 0) + tl.sum(by_key[:, None] * corrections, 0)
    read = of_state * tl.sum(current * query[:, None], 0) + tl.sum(by_query[:, None] * corrections, 0)
    delta = strength * (value - now * found)
    is_dim, is_column = dim < KEY_DIM, column < DIM
    if last == PERIOD - 1:
        current *= now * of_state
        for index in range(last - kept, last):  # loaded again: registers are short
            entry = updates + index * ENTRY
            factor = now * tl.exp(before - tl.load(entry + KEY_DIM + DIM))
            old = tl.load(entry + dim, mask=is_dim, other=0.0) * factor
            current += old[:, None] * tl.load(entry + KEY_DIM + column, mask=is_column, other=0.0)[None, :]
        current += key[:, None] * delta[None, :]
        mask = is_dim[:, None] & is_column[None, :]
        offset = dim[:, None] * DIM + column[None, :]
        tl.store(matrix + offset, current, mask=mask)
        if saved >= 0:
            tl.store(save_matrix + offset, current, mask=mask)
    else:
        tl.store(updates + last * ENTRY + KEY_DIM + column, delta, mask=is_column)
    return now * read + overlap * delta
