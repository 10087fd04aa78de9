"""DrawInputs: what a captured draw reads of a step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream.runner.batch.input_batch import Gathered


class DrawInputs(NamedTuple):
    """The hidden states to sample from, their rows, positions and, with drafts, offsets."""

    hidden: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor | None

    @classmethod
    def of(cls, batch: Gathered, hidden: torch.Tensor) -> DrawInputs:
        """All hidden states of a step."""
        return cls(hidden, batch.rows, batch.view.lengths, batch.offsets)


class PickedInputs:
    """The inputs of draws of some hidden states of a step, at fixed addresses: a captured draw reads them there."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._buffers: tuple[torch.Tensor, ...] | None = None

    def bring(self, hidden: torch.Tensor, positions: torch.Tensor, pick: torch.Tensor) -> DrawInputs:
        """Device: `pick` [3 or 4, n]: indices of hidden states, indices of their rows in the step, the rows, offsets if
        there are drafts."""
        if self._buffers is None:
            ids = torch.zeros(3, self._num_rows, dtype=torch.int64, device=hidden.device)
            self._buffers = hidden.new_zeros(self._num_rows, hidden.shape[1]), *ids.unbind(0)
        tokens, indices, rows, *offsets = pick.unbind(0)
        own_hidden, own_positions, own_rows, own_offsets = (buffer[: len(tokens)] for buffer in self._buffers)
        torch.index_select(hidden, 0, tokens, out=own_hidden)
        torch.index_select(positions, 0, indices, out=own_positions)
        own_rows.copy_(rows)
        return DrawInputs(own_hidden, own_rows, own_positions, own_offsets.copy_(offsets[0]) if offsets else None)
