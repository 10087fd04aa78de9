"""Recurrences with drafts in plain torch: replay of accepted tokens, and rows whose drafts may be rejected.

`RecurrentSteps` describes the scheme. A recurrence is given by a few functions, one token at a time. No value is read
on the host: counts that the host knows only save work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from slipstream.ops.recurrent.steps import DraftSteps, RecurrentSteps


class Recurrence(NamedTuple):
    """Inputs of n tokens are any tuple of tensors [n, ...]; states are [n, *shape]."""

    take: Callable[[slice], Any]  # the inputs of these tokens of the step
    recall: Callable[[torch.Tensor, torch.Tensor], Any]  # of the tokens at these slots and positions, from the rings
    change: Callable[[Any, torch.Tensor], torch.Tensor]  # the states after the tokens with these inputs
    read: Callable[[slice, torch.Tensor], torch.Tensor]  # the outputs of tokens of the step, from the states after them

    def step(self, tokens: slice, current: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and new states of tokens of different rows."""
        current = self.change(self.take(tokens), current)
        return self.read(tokens, current), current


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
    current: torch.Tensor | None = None
    for index in range(len(out)):
        one = slice(index, index + 1)
        slot, is_first = steps.slots[one].long(), drafts.offsets[one] == 0
        if drafts.may_begin(index):
            begun = _replayed(state, steps, drafts, index, recurrence)
            current = begun if current is None else torch.where(_like(is_first, begun), begun, current)
        assert current is not None, "the first draw of a step is the first of its row"
        before = current
        is_seen = steps.seen_positions[one] > steps.first_positions[one]
        current = torch.where(_like(is_seen, before), before, recurrence.change(recurrence.take(one), before))
        out[one] = recurrence.read(one, current)
        if drafts.may_begin(index):
            is_sole = drafts.counts[one] == 1
            _store(state, slot, is_first, torch.where(_like(is_sole, current), current, before))
            _save(state, steps, drafts, index, current, is_sole & _reaches(steps, drafts, index))


def remember_(ring: torch.Tensor, steps: RecurrentSteps, inputs: torch.Tensor) -> None:
    """Stores the inputs [B, size] of a step of one token per row in the ring [rows, columns, size], by position."""
    ring[steps.slots.long(), steps.first_positions.long() % ring.shape[1]] = inputs.to(ring.dtype)


def _replayed(
    state: torch.Tensor, steps: RecurrentSteps, drafts: DraftSteps, index: int, recurrence: Recurrence
) -> torch.Tensor:
    """The state of a row in front of its first token, [1, *shape]. Saves the state where it passes the position."""
    one = slice(index, index + 1)
    slot, base, first = steps.slots[one].long(), drafts.bases[one], steps.first_positions[one]
    current = state.index_select(0, slot)
    current = torch.where(_like(base == 0, current), 0.0, current)
    for number in range(drafts.max_replays):
        position = base + number
        is_replayed = position < first
        after = recurrence.change(recurrence.recall(slot, position.long()), current)
        current = torch.where(_like(is_replayed, current), after, current)
        _save(state, steps, drafts, index, current, is_replayed & (position + 1 == drafts.save_positions[one]))
    return current


def _reaches(steps: RecurrentSteps, drafts: DraftSteps, index: int) -> torch.Tensor:
    one = slice(index, index + 1)
    return steps.first_positions[one] + 1 == drafts.save_positions[one]


def _save(
    state: torch.Tensor,
    steps: RecurrentSteps,
    drafts: DraftSteps,
    index: int,
    current: torch.Tensor,
    is_there: torch.Tensor,
) -> None:
    saved = drafts.save_slots[index : index + 1]
    is_saved = is_there & (saved >= 0)
    _store(state, torch.where(is_saved, saved, steps.slots[index : index + 1]).long(), is_saved, current)


def _store(state: torch.Tensor, slot: torch.Tensor, is_stored: torch.Tensor, current: torch.Tensor) -> None:
    old = state.index_select(0, slot)
    state.index_copy_(0, slot, torch.where(_like(is_stored, current), current, old))


def _like(flag: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return flag.view(-1, *(1,) * (state.dim() - 1))


# Causal depthwise convolution in plain torch, in float32 at least, in float64 when the input is float64.
#
# The state of a row is a ring of its last inputs: the input of position p lies in column p % columns. A ring has at
# least as many columns as the convolution is wide. A step of one token then writes one column that no other token
# reads, so a kernel may read and write the ring without synchronisation. With drafts a ring has more columns
# (`ring_columns`), so that inputs of rejected drafts overwrite none that is still read.

Activation = Literal["silu"] | None


def causal_conv1d(
    x: torch.Tensor,  # [T, channels]
    weight: torch.Tensor,  # [channels, width], the last column for the token itself
    bias: torch.Tensor | None,  # [channels]
    state: torch.Tensor,  # [slots, channels, columns]
    steps: RecurrentSteps,
    activation: Activation = None,
) -> torch.Tensor:
    """activation(convolution + bias) of each token over its row, [T, channels]. Inputs before position 0 are zeros.

    Writes the last inputs of each row to its slot, and those before each save to the save slot. Tokens of no row
    get zeros.
    """
    num_tokens, width, columns = len(x), weight.shape[1], state.shape[2]
    past = width - 1
    slots, firsts, starts = steps.slots.long(), steps.first_positions.long(), steps.starts.long()
    tokens = torch.arange(num_tokens, device=x.device)
    rows = torch.searchsorted(starts[1:], tokens, right=True)
    in_row = rows < len(slots)
    rows = rows.clamp(max=len(slots) - 1)
    ends = starts[1:] - starts[:-1]
    if steps.is_single and steps.drafts is not None:  # a draw begins where its row begins, and ends with its own token
        of_drafts = steps.drafts.offsets.long()
        firsts, starts, ends = firsts - of_drafts, tokens - of_drafts, of_drafts + 1
    offsets = tokens - starts[rows]

    # [rows * past + T, channels]: the last inputs of each row before the step, then the step's
    positions = firsts[:, None] - past + torch.arange(past, device=x.device)
    carried = state[slots[:, None], :, positions % columns]
    carried = torch.where((positions >= 0)[..., None], carried, 0.0)
    inputs = torch.cat((carried.flatten(0, 1), x))

    def find(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The index in `inputs` of the input that is `offsets` after the row's first token of the step."""
        here = len(slots) * past + starts[rows] + offsets
        return torch.where(offsets >= 0, here, rows * past + past + offsets).clamp(0, len(inputs) - 1)

    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for column in range(width):
        tap = inputs.index_select(0, find(rows, offsets - (past - column)))
        out += tap.to(wide) * weight[:, column].to(wide)
    if bias is not None:
        out += bias.to(wide)
    if activation == "silu":
        out = F.silu(out)

    def store(slots: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, num: int = past) -> None:
        """Write `num` inputs before `ends`, which count from the row's first token of the step."""
        for back in range(1, num + 1):
            offset = ends - back
            found = inputs.index_select(0, find(rows, offset)).to(state.dtype)
            state[slots, :, (firsts[rows] + offset) % columns] = found

    def store_last() -> None:
        # as many as the width: the last position may be computed again
        store(slots, torch.arange(len(slots), device=x.device), ends, width)

    if steps.drafts is not None and steps.is_single:
        store_last()
        _save_passed(state, steps, steps.drafts, width)
        return out.to(x.dtype)
    if steps.drafts is not None:
        _save_passed(state, steps, steps.drafts, width)
    # an entry without a save writes to its row's slot, where the last inputs of the row are written over it
    saved, owners, borders = _save_slots(steps)
    if saved is not None:
        store(torch.where(saved < 0, slots[owners], saved), owners, borders)
    store_last()
    return torch.where(in_row[:, None], out, 0.0).to(x.dtype)


def convolve_ring(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int64
    activation: Activation = None,
) -> torch.Tensor:
    """The outputs [n, channels] of `causal_conv1d` for tokens whose inputs are all in their rings."""
    width, wide = weight.shape[1], torch.promote_types(state.dtype, torch.float32)
    out = torch.zeros(len(slots), len(weight), dtype=wide, device=state.device)
    for column in range(width):
        position = positions - (width - 1 - column)
        tap = torch.where((position >= 0)[:, None], state[slots, :, position % state.shape[2]], 0.0)
        out += tap.to(wide) * weight[:, column].to(wide)
    if bias is not None:
        out += bias.to(wide)
    return (F.silu(out) if activation == "silu" else out).to(state.dtype)


def _save_passed(state: torch.Tensor, steps: RecurrentSteps, drafts: DraftSteps, width: int) -> None:
    """Copies the inputs before each save of `drafts`, which lie in the ring of its row, to the save slot."""
    slots = steps.slots.long()
    targets = torch.where(drafts.save_slots < 0, slots, drafts.save_slots.long())
    for back in range(1, width):
        column = (drafts.save_positions.long() - back) % state.shape[2]
        state[targets, :, column] = state[slots, :, column]


def _save_slots(steps: RecurrentSteps) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Per row or chunk: the slot to save to (-1: none), the row, and the end of the chunk, counted from the row's first
    token."""
    starts = steps.starts.long()
    if steps.chunks is None:
        rows = torch.arange(len(steps.slots), device=starts.device)
        return None if steps.save_slots is None else steps.save_slots.long(), rows, torch.ones_like(rows)
    rows, first, count, saved = steps.chunks.long().unbind(1)
    saved, rows = torch.where(rows < 0, -1, saved), rows.clamp(min=0)
    return saved, rows, first + count - starts[rows]
