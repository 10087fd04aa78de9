"""DraftedPlan: a plan in which each position of a drafted row is a row of one token.

The runner computes a drafted row as rows of one token: each has its own position and length, reads the keys that those
before it wrote in the same step, and draws one token. So a step of decodes and drafts is a decode step of more rows: it
uses the same kernels and captured graphs, and every part of the runner handles one drawn token per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np

from slipstream.step import NO_INTS, Ints, StepPlan


@dataclass(frozen=True, slots=True)
class DraftedPlan(StepPlan):
    """Rows repeat, and `num_drawn` is 0 or 1."""

    # [planned] index of the row among those of its drafted row; 0 for all others
    offsets: Ints = field(default_factory=lambda: NO_INTS)


_FIELDS = tuple(each.name for each in fields(StepPlan))


def expand_drafts(plan: StepPlan) -> DraftedPlan:
    """Host: the plan with a row of one token for each position of a drafted row."""
    repeats = np.maximum(plan.num_drawn, 1)
    is_drafted = repeats > 1
    assert (plan.num_tokens == repeats)[is_drafted].all() and not plan.num_host_tokens[is_drafted].any(), (
        "a drafted row draws after each of its positions, whose tokens are the device's own"
    )
    first = np.cumsum(repeats) - repeats
    index = np.repeat(np.arange(len(repeats)), repeats)
    offsets = (np.arange(len(index)) - first[index]).astype(np.int32)
    num_tokens = np.where(is_drafted, 1, plan.num_tokens).astype(np.int32)[index]
    pooling = plan.pooling
    if pooling is not None and pooling.ends is not None:
        pooling = replace(pooling, ends=pooling.ends[index])
    states = plan.states
    if states is not None and len(states.saves):
        saves = states.saves.copy()
        saves[:, 0] = first[saves[:, 0]]
        states = replace(states, saves=saves)
    adapters = plan.adapters
    if adapters is not None and adapters.slots is not None:
        adapters = replace(adapters, slots=adapters.slots[index])
    same = {name: getattr(plan, name) for name in _FIELDS}
    return DraftedPlan(
        **same
        | dict(
            rows=plan.rows[index],
            num_tokens=num_tokens,
            # all but the last position of a drafted row end before its length
            lengths=plan.lengths[index] - np.where(is_drafted, repeats - 1, 0).astype(np.int32)[index] + offsets,
            num_drawn=np.minimum(plan.num_drawn, 1)[index],
            num_host_tokens=plan.num_host_tokens[index],
            following=plan.following[index] if len(plan.following) else plan.following,
            pooling=pooling,
            states=states,
            adapters=adapters,
        ),
        offsets=offsets,
    )
