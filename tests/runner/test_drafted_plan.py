"""A drafted row becomes rows of one token each; the other rows of the plan stay."""

from __future__ import annotations

import numpy as np

from slipstream.contracts.step import NO_INTS, PoolPlan, StepPlan
from slipstream.runner.drafted_plan import expand_drafts


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_positions_of_a_drafted_row_are_rows() -> None:
    """A decode, two drafted rows, a prompt that is pooled, and a chunk that draws."""
    plan = StepPlan(
        step=7,
        released=NO_INTS,
        admitted=(),
        rows=ints(4, 2, 0, 3, 5),
        num_tokens=ints(1, 3, 2, 4, 2),
        lengths=ints(10, 30, 8, 4, 9),
        num_drawn=ints(1, 3, 2, 0, 1),
        num_host_tokens=ints(0, 0, 0, 4, 2),
        tokens=ints(1, 2, 3, 4, 5, 6),
        new_pages=(),
        pooling=PoolPlan(ends=np.array([False, False, False, True, False])),
        has_drafts=True,
        num_proposed=2,
    )
    made = expand_drafts(plan)
    assert made.rows.tolist() == [4, 2, 2, 2, 0, 0, 3, 5]
    assert made.num_tokens.tolist() == [1, 1, 1, 1, 1, 1, 4, 2]
    assert made.offsets.tolist() == [0, 0, 1, 2, 0, 1, 0, 0]
    assert made.lengths.tolist() == [10, 28, 29, 30, 7, 8, 4, 9]
    assert made.num_drawn.tolist() == [1, 1, 1, 1, 1, 1, 0, 1]
    assert made.num_host_tokens.tolist() == [0, 0, 0, 0, 0, 0, 4, 2]
    assert made.draw_offsets.tolist() == [0, 0, 1, 2, 0, 1, 0]
    assert made.first_draws.tolist() == [0, 1, 4, 6], "of the rows that draw"
    assert made.pooling is not None and made.pooling.ends is not None
    assert made.pooling.ends.tolist() == [False] * 6 + [True, False]
    assert (made.step, made.num_proposed, made.total_tokens) == (7, 2, plan.total_tokens)
    assert made.tokens is plan.tokens


def test_plans_with_the_same_numbers_keep_their_own_rows() -> None:
    """What depends on the numbers only is computed once, and cannot be written."""
    shared = dict(
        released=NO_INTS, admitted=(), num_tokens=ints(1, 3), num_drawn=ints(1, 3), num_host_tokens=ints(0, 0),
        tokens=NO_INTS, new_pages=(), has_drafts=True,
    )  # fmt: skip
    for rows, lengths in ((ints(4, 2), ints(10, 30)), (ints(1, 3), ints(7, 9))):
        made = expand_drafts(StepPlan(step=1, rows=rows, lengths=lengths, **shared))
        assert made.rows.tolist() == [rows[0], *[rows[1]] * 3]
        assert made.lengths.tolist() == [lengths[0], *range(lengths[1] - 2, lengths[1] + 1)]
        assert made.offsets.tolist() == [0, 0, 1, 2] and not made.offsets.flags.writeable


def test_plans_that_share_their_rows_share_the_expanded_ones() -> None:
    """The runner finds by this array what it found for the last plan."""
    numbers = dict(num_tokens=ints(2, 3), num_drawn=ints(2, 3), num_host_tokens=ints(0, 0))
    shared = dict(released=NO_INTS, admitted=(), tokens=NO_INTS, new_pages=(), has_drafts=True) | numbers
    rows = ints(4, 2)
    first, second, other = (
        expand_drafts(StepPlan(step=1, rows=own, lengths=ints(length, 30), **shared))
        for own, length in ((rows, 10), (rows, 12), (ints(4, 3), 12))
    )
    assert first.rows is second.rows and not first.rows.flags.writeable
    assert second.lengths.tolist() == [11, 12, 28, 29, 30]
    assert other.rows.tolist() == [4, 4, 3, 3, 3]
