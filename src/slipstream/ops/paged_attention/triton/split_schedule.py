"""A program's share of a step's splits: some rows of one token, and the splits of each from one to another.

A share belongs to as many programs as there are kv heads. They run side by side and read the same pages, each its own
head's part of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.ops.paged_attention.work_list import RECORD


@triton.jit
def splits_of_program(shares, KV_HEADS: tl.constexpr):
    """This program's kv head; its first single and split; the single and split that the next share begins with; and
    where its own singles end."""
    share = shares + tl.program_id(0) // KV_HEADS * 2
    first = tl.load(share)
    split = tl.load(share + 1)
    last = tl.load(share + 2)
    stop = tl.load(share + 3)
    return tl.program_id(0) % KV_HEADS, first, split, last, stop, last + tl.where(stop > 0, 1, 0)


@triton.jit
def read_single(singles, single, first, split, last, stop):
    """Row, token, first key, keys of a split, number of splits, place of the first of them, length; and from which
    split to which it belongs to a share."""
    record = singles + tl.cast(single, tl.int64) * RECORD
    num_splits = tl.load(record + 4)
    return (
        tl.load(record).to(tl.int64),
        tl.load(record + 1).to(tl.int64),
        tl.load(record + 2),
        tl.load(record + 3),
        num_splits,
        tl.load(record + 5).to(tl.int64),
        tl.load(record + 6),
        tl.where(single == first, split, 0),
        tl.where(single == last, stop, num_splits),
    )
