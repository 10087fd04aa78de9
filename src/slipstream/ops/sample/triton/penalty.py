"""Penalties for tokens that occur in a row, applied to logits when they are loaded."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.ops.sample import reference

IN_OUTPUT = tl.constexpr(reference.IN_OUTPUT)


@triton.jit
def find_penalty(row, size, counts, seen, entries, values, earlier, EARLIER: tl.constexpr):
    """The penalty of a row, for `with_penalty`: its entry in the tables, below 0 if the row has none, and its part of
    each table."""
    entry = tl.load(entries + row).to(tl.int64)
    counts += entry * size
    seen += entry * size
    values += row * 3
    if earlier is None:
        return entry, counts, seen, values, values  # the last is not read; a kernel cannot return None
    else:
        return entry, counts, seen, values, earlier + row * EARLIER


@triton.jit
def with_penalty(x, token, mask, size, penalty, EARLIER):
    """x with the penalty of its row, if the row has one. `penalty` None: no row has one."""
    if penalty is not None:
        entry, counts, seen, values, earlier = penalty
        if entry >= 0:
            x = penalized(x, token, mask & (token < size), counts, seen, values, earlier, EARLIER)
    return x


@triton.jit
def penalized(
    x,
    token,
    mask,
    counts,  # [V] of the row
    seen,  # [V] of the row
    values,  # [3] repetition, presence, frequency
    earlier,  # [EARLIER] further tokens of the row's output, -1: none; not read if EARLIER is 0
    EARLIER,
):
    """x with penalties. Counts (4 bytes per token, flags have 1) are loaded only with a frequency penalty."""
    repetition = tl.load(values).to(tl.float32)
    presence = tl.load(values + 1).to(tl.float32)
    frequency = tl.load(values + 2).to(tl.float32)
    flags = tl.load(seen + token, mask=mask, other=0)
    more = tl.zeros_like(x)
    if EARLIER > 0:
        for index in range(EARLIER):
            more += tl.where(token == tl.load(earlier + index), 1.0, 0.0)
        flags = tl.where(more > 0.0, flags | IN_OUTPUT, flags)
    factor = tl.where(flags != 0, repetition, 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    if frequency != 0.0:
        # an explicit fma: find_floor and draw must compute the same bits
        x = tl.fma(-frequency, tl.load(counts + token, mask=mask, other=0).to(tl.float32) + more, x)
    return x - tl.where(flags >= IN_OUTPUT, presence, 0.0)


def num_earlier(penalty: reference.Penalty | None) -> int:
    """Host: number of further tokens per row."""
    return 0 if penalty is None or penalty.earlier is None else penalty.earlier.shape[1]
