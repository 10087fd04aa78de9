"""DraftedPlan: a plan in which each position of a drafted row is a row of one token.

The runner computes a drafted row as rows of one token: each has its own position and length, reads the keys that those
before it wrote in the same step, and draws one token. So a step of decodes and drafts is a decode step of more rows: it
uses the same kernels and captured graphs, and every part of the runner handles one drawn token per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from slipstream.contracts.step import NO_INTS, Ints, StepPlan

Indices = np.ndarray[Any, np.dtype[np.int64]]
_NO_INDICES: Indices = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class DraftedPlan(StepPlan):
    """Rows repeat, and `num_drawn` is 0 or 1."""

    # [planned] index of the row among those of its drafted row; 0 for all others
    offsets: Ints = field(default_factory=lambda: NO_INTS)
    # [drawn] the same of rows that draw, int64
    draw_offsets: Indices = field(default_factory=lambda: _NO_INDICES)
    # [sampling] index of each row's first draw among all draws
    first_draws: Indices = field(default_factory=lambda: _NO_INDICES)


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
        rows=expanded.rows_of(plan.rows),
        num_tokens=expanded.num_tokens,
        lengths=plan.lengths[index] + expanded.longer,
        num_drawn=expanded.num_drawn,
        num_host_tokens=expanded.num_host_tokens,
        following=plan.following[index] if len(plan.following) else plan.following,
        pooling=pooling,
        states=states,
        adapters=adapters,
        offsets=expanded.offsets,
        draw_offsets=expanded.draw_offsets,
        first_draws=expanded.first_draws,
    )


@dataclass(slots=True)
class _Expanded:
    """The parts that depend on the numbers of a plan only. Plans share them, so they are never written."""

    row_index: Ints  # [expanded] of the row in the plan
    first: Ints  # [planned] index of its first row of one token
    offsets: Ints
    longer: Ints  # [expanded] length of the row less that of the drafted row; all but the last position end before it
    num_tokens: Ints
    num_drawn: Ints
    num_host_tokens: Ints
    draw_offsets: Indices
    first_draws: Indices
    _last_rows: tuple[Ints, Ints] | None = None  # of a plan, and those that they became

    def rows_of(self, rows: Ints) -> Ints:
        """[expanded] rows. Plans with the same array of rows get the same array: what was found for it is found
        again."""
        last = self._last_rows
        if last is None or last[0] is not rows:
            last = self._last_rows = rows, rows[self.row_index]
            last[1].flags.writeable = False
        return last[1]


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
    draws = np.minimum(num_drawn, 1)[index]
    draw_offsets = offsets[draws > 0].astype(np.int64)
    arrays = (
        index,
        first,
        offsets,
        offsets - np.where(is_drafted, repeats - 1, 0).astype(np.int32)[index],
        np.where(is_drafted, 1, num_tokens).astype(np.int32)[index],
        draws,
        num_host_tokens[index],
        draw_offsets,
        np.flatnonzero(draw_offsets == 0),
    )
    for array in arrays:
        array.flags.writeable = False
    return _Expanded(*arrays)
