"""Causal depthwise convolution in plain torch, in float32 at least, in float64 when the input is float64.

The state of a row is a ring of its last inputs: the input of position p lies in column p % columns. A ring has at least
as many columns as the convolution is wide. A step of one token then writes one column that no other token reads, so a
kernel may read and write the ring without synchronisation. With drafts a ring has more columns (`ring_columns`), so
that inputs of rejected drafts overwrite none that is still read.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from slipstream.ops.recurrent_steps import DraftSteps, RecurrentSteps

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
