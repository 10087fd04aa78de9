"""Causal depthwise convolution in plain torch, in float32 at least, in float64 when the input is float64.

The state of a row is a ring of its last inputs: the input of position p lies in column p % width. A step of one token
then writes one column that no other token reads, so a kernel may read and write the ring without synchronisation.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from slipstream.ops.recurrent_steps import RecurrentSteps

Activation = Literal["silu"] | None


def causal_conv1d(
    x: torch.Tensor,  # [T, channels]
    weight: torch.Tensor,  # [channels, width], the last column for the token itself
    bias: torch.Tensor | None,  # [channels]
    state: torch.Tensor,  # [slots, channels, width]
    steps: RecurrentSteps,
    activation: Activation = None,
) -> torch.Tensor:
    """activation(convolution + bias) of each token over its row, [T, channels]. Inputs before position 0 are zeros.

    Writes the last inputs of each row to its slot, and those before each save to the save slot. Tokens of no row
    get zeros.
    """
    num_tokens, width = len(x), weight.shape[1]
    past = width - 1
    slots, firsts, starts = steps.slots.long(), steps.first_positions.long(), steps.starts.long()
    tokens = torch.arange(num_tokens, device=x.device)
    rows = torch.searchsorted(starts[1:], tokens, right=True)
    in_row = rows < len(slots)
    rows = rows.clamp(max=len(slots) - 1)
    offsets = tokens - starts[rows]

    # [rows * past + T, channels]: the last inputs of each row before the step, then the step's
    positions = firsts[:, None] - past + torch.arange(past, device=x.device)
    carried = state[slots[:, None], :, positions % width]
    carried = torch.where((positions >= 0)[..., None], carried, 0.0)
    inputs = torch.cat((carried.flatten(0, 1), x))

    def find(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where in `inputs` the input lies that is `offsets` after the row's first token of the step."""
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

    def store(slots: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> None:
        """Write the inputs before `ends`, which count from the row's first token of the step."""
        for back in range(1, width):
            offset = ends - back
            found = inputs.index_select(0, find(rows, offset)).to(state.dtype)
            state[slots, :, (firsts[rows] + offset) % width] = found

    # an entry without a save writes to its row's slot, where the last inputs of the row are written over it
    saved, owners, ends = _save_slots(steps)
    if saved is not None:
        store(torch.where(saved < 0, slots[owners], saved), owners, ends)
    all_rows = torch.arange(len(slots), device=x.device)
    store(slots, all_rows, starts[1:] - starts[:-1])
    return torch.where(in_row[:, None], out, 0.0).to(x.dtype)


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
