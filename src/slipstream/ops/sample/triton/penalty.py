"""Penalties of tokens that a row has seen, on logits as they are read."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.ops.sample import reference

IN_OUTPUT = tl.constexpr(reference.IN_OUTPUT)


@triton.jit
def penalized(
    x,
    token,
    mask,
    counts,  # [V] of the row, likewise
    seen,  # [V]
    values,  # [3] repetition, presence, frequency
):
    """Flags are a byte a token. Counts are four and only read where their number matters."""
    repetition = tl.load(values).to(tl.float32)
    presence = tl.load(values + 1).to(tl.float32)
    frequency = tl.load(values + 2).to(tl.float32)
    flags = tl.load(seen + token, mask=mask, other=0)
    factor = tl.where(flags != 0, repetition, 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    if frequency != 0.0:
        # rounded once, wherever this is compiled into: those who cut and those who draw must see the same numbers
        x = tl.fma(-frequency, tl.load(counts + token, mask=mask, other=0).to(tl.float32), x)
    return x - tl.where(flags >= IN_OUTPUT, presence, 0.0)
