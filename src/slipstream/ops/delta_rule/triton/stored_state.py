"""Reads what `decode.py` has stored of a value head: its state, and the updates that were kept since."""

from __future__ import annotations

import triton
import triton.language as tl


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
