"""DraftedPlan: a plan in which each position of a drafted row is a row of one token.

The runner computes a drafted row as rows of one token: each has its own position and length, reads the keys that those
before it wrote in the same step, and draws one token. So a step of decodes and drafts is a decode step of more rows: it
uses the same kernels and captured graphs, and every part of the runner handles one drawn token per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from slipstream.step import NO_INTS, Ints, StepPlan


@dataclass(frozen=True, slots=True)
class DraftedPlan(StepPlan):
    """Rows repeat, and `num_drawn` is 0 or 1."""

    # [planned] index of the row among those of its drafted row; 0 for all others
    offsets: Ints = field(default_factory=lambda: NO_INTS)


_CHANGED = (
    "rows",
    "num_tokens",
    "lengths",
    "num_drawn",
    "num_host_tokens",
    "following",
    "pooling",
    "states",
    "adapters",
)
_SAME = tuple(each.name for each in fields(StepPlan) if each.name not in _CHANGED)


def expand_drafts(plan: StepPlan) -> DraftedPlan:
    """Host: the plan with a row of one token for each position of a drafted row."""
    numbers = plan.num_drawn, plan.num_tokens, plan.num_host_tokens
    assert all(each.dtype == np.int32 for each in numbers), [each.dtype for each in numbers]
    expanded = _expand(*(each.tobytes() for each in numbers))
    index, pooling, states, adapters = expanded.row_index, plan.pooling, plan.states, plan.adapters
    if pooling is not None and pooling.ends is not None:
        pooling = replace(pooling, ends=pooling.ends[index])
    if states is not None and len(states.saves):
        saves = states.saves.copy()
        saves[:, 0] = expanded.first[saves[:, 0]]
        states = replace(states, saves=saves)
    if adapters is not None and adapters.slots is not None:
        adapters = replace(adapters, slots=adapters.slots[index])
    return DraftedPlan(
        **{name: getattr(plan, name) for name in _SAME},
        rows=plan.rows[index],
        num_tokens=expanded.num_tokens,
        lengths=plan.lengths[index] + expanded.longer,
        num_drawn=expanded.num_drawn,
        num_host_tokens=expanded.num_host_tokens,
        following=plan.following[index] if len(plan.following) else plan.following,
        pooling=pooling,
        states=states,
        adapters=adapters,
        offsets=expanded.offsets,
    )


class _Expanded(NamedTuple):
    """The parts that depend on the numbers of a plan only. Plans share them, so they are never written."""

    row_index: Ints  # [expanded] of the row in the plan
    first: Ints  # [planned] index of its first row of one token
    offsets: Ints
    longer: Ints  # [expanded] length of the row less that of the drafted row; all but the last position end before it
    num_tokens: Ints
    num_drawn: Ints
    num_host_tokens: Ints


@lru_cache(256)  # consecutive plans mostly have the same numbers of drafts
def _expand(drawn: bytes, tokens: bytes, host_tokens: bytes) -> _Expanded:
    """The arguments are arrays of int32, one number per planned row."""
    num_drawn, num_tokens, num_host_tokens = (np.frombuffer(each, np.int32) for each in (drawn, tokens, host_tokens))
    repeats = np.maximum(num_drawn, 1)
    is_drafted = repeats > 1
    assert (num_tokens == repeats)[is_drafted].all() and not num_host_tokens[is_drafted].any(), (
        "a drafted row draws after each of its positions, whose tokens are the device's own"
    )
    first = np.cumsum(repeats) - repeats
    index = np.repeat(np.arange(len(repeats)), repeats)
    offsets = (np.arange(len(index)) - first[index]).astype(np.int32)
    expanded = _Expanded(
        index,
        first,
        offsets,
        offsets - np.where(is_drafted, repeats - 1, 0).astype(np.int32)[index],
        np.where(is_drafted, 1, num_tokens).astype(np.int32)[index],
        np.minimum(num_drawn, 1)[index],
        num_host_tokens[index],
    )
    for array in expanded:
        array.flags.writeable = False
    return expanded
