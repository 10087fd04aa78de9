"""The share of a program: consecutive splits of rows of one token.

As many programs as there are kv heads compute one share. They run in parallel and read the same pages, each its own
head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.ops.paged_attention.single_list import SINGLE_RECORD


@triton.jit
def splits_of_program(shares, KV_HEADS: tl.constexpr):
    """The kv head of this program; its first single and split; the first single and split of the next share; the end of
    its own singles."""
    share = shares + tl.program_id(0) // KV_HEADS * 2
    first = tl.load(share)
    split = tl.load(share + 1)
    last = tl.load(share + 2)
    stop = tl.load(share + 3)
    return tl.program_id(0) % KV_HEADS, first, split, last, stop, last + tl.where(stop > 0, 1, 0)


@triton.jit
def read_single(singles, single, first, split, last, stop):
    """Row, token, first key, keys per split, number of splits, index of the first partial result, length, number of
    queries; and the range of splits in this share."""
    record = singles + tl.cast(single, tl.int64) * SINGLE_RECORD
    num_splits = tl.load(record + 4)
    return (
        tl.load(record).to(tl.int64),
        tl.load(record + 1).to(tl.int64),
        tl.load(record + 2),
        tl.load(record + 3),
        num_splits,
        tl.load(record + 5).to(tl.int64),
        tl.load(record + 6),
        tl.load(record + 8),
        tl.where(single == first, split, 0),
        tl.where(single == last, stop, num_splits),
    )
