"""Recurrences with drafts in plain torch: replay of accepted tokens, and rows whose drafts may be rejected.

`RecurrentSteps` describes the scheme. A recurrence is given by a few functions, one token at a time. No value is read
on the host: counts that the host knows only save work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from slipstream.ops.recurrent_steps.steps import DraftSteps, RecurrentSteps


class Recurrence(NamedTuple):
    """Inputs of n tokens are any tuple of tensors [n, ...]; states are [n, *shape]."""

    take: Callable[[slice], Any]  # the inputs of these tokens of the step
    recall: Callable[[torch.Tensor, torch.Tensor], Any]  # of the tokens at these slots and positions, from the rings
    change: Callable[[Any, torch.Tensor], torch.Tensor]  # the states after the tokens with these inputs
    read: Callable[[slice, torch.Tensor], torch.Tensor]  # the outputs of tokens of the step, from the states after them

    def step(self, tokens: slice, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and new states of tokens of different rows."""
        held = self.change(self.take(tokens), held)
        return self.read(tokens, held), held


def replay_(state: torch.Tensor, steps: RecurrentSteps, recurrence: Recurrence) -> None:
    """Brings the state of each row up to its first position, in a step in which no row has drafts."""
    assert steps.drafts is not None
    if not steps.drafts.max_replays:
        return
    for index in range(len(steps.slots)):
        slot = steps.slots[index : index + 1].long()
        is_behind = steps.drafts.bases[index : index + 1] < steps.first_positions[index : index + 1]
        _store(state, slot, is_behind, _replayed(state, steps, steps.drafts, index, recurrence))


def verify_(out: torch.Tensor, state: torch.Tensor, steps: RecurrentSteps, recurrence: Recurrence) -> None:
    """Fills `out` [B, ...] in a step of one token per row with drafts. The state of a row with drafts stays in front of
    its first token, or behind it if it has seen that token."""
    drafts = steps.drafts
    assert steps.is_single and drafts is not None
    held: torch.Tensor | None = None
    for index in range(len(out)):
        one = slice(index, index + 1)
        slot, is_first = steps.slots[one].long(), drafts.offsets[one] == 0
        if drafts.may_begin(index):
            begun = _replayed(state, steps, drafts, index, recurrence)
            held = begun if held is None else torch.where(_like(is_first, begun), begun, held)
        assert held is not None, "the first draw of a step is the first of its row"
        before = held
        is_seen = steps.seen_positions[one] > steps.first_positions[one]
        held = torch.where(_like(is_seen, before), before, recurrence.change(recurrence.take(one), before))
        out[one] = recurrence.read(one, held)
        if drafts.may_begin(index):
            is_sole = drafts.counts[one] == 1
            _store(state, slot, is_first, torch.where(_like(is_sole, held), held, before))
            _save(state, steps, drafts, index, held, is_sole & _reaches(steps, drafts, index))


def remember_(ring: torch.Tensor, steps: RecurrentSteps, inputs: torch.Tensor) -> None:
    """Stores the inputs [B, size] of a step of one token per row in the ring [rows, columns, size], by position."""
    ring[steps.slots.long(), steps.first_positions.long() % ring.shape[1]] = inputs.to(ring.dtype)


def _replayed(
    state: torch.Tensor, steps: RecurrentSteps, drafts: DraftSteps, index: int, recurrence: Recurrence
) -> torch.Tensor:
    """The state of a row in front of its first token, [1, *shape]. Saves the state where it passes the position."""
    one = slice(index, index + 1)
    slot, base, first = steps.slots[one].long(), drafts.bases[one], steps.first_positions[one]
    held = state.index_select(0, slot)
    held = torch.where(_like(base == 0, held), 0.0, held)
    for number in range(drafts.max_replays):
        position = base + number
        is_replayed = position < first
        after = recurrence.change(recurrence.recall(slot, position.long()), held)
        held = torch.where(_like(is_replayed, held), after, held)
        _save(state, steps, drafts, index, held, is_replayed & (position + 1 == drafts.save_positions[one]))
    return held


def _reaches(steps: RecurrentSteps, drafts: DraftSteps, index: int) -> torch.Tensor:
    one = slice(index, index + 1)
    return steps.first_positions[one] + 1 == drafts.save_positions[one]


def _save(
    state: torch.Tensor,
    steps: RecurrentSteps,
    drafts: DraftSteps,
    index: int,
    held: torch.Tensor,
    is_there: torch.Tensor,
) -> None:
    saved = drafts.save_slots[index : index + 1]
    is_saved = is_there & (saved >= 0)
    _store(state, torch.where(is_saved, saved, steps.slots[index : index + 1]).long(), is_saved, held)


def _store(state: torch.Tensor, slot: torch.Tensor, is_stored: torch.Tensor, held: torch.Tensor) -> None:
    old = state.index_select(0, slot)
    state.index_copy_(0, slot, torch.where(_like(is_stored, held), held, old))


def _like(flag: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return flag.view(-1, *(1,) * (state.dim() - 1))
