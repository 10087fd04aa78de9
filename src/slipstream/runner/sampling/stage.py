"""Stage: a RowState that edits logits before a token is drawn.

To add one: a file with a class of this shape, and its place in the order in `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.runner.batch.row_state import RowState
from slipstream.runner.batch.staging import Upload
from slipstream.step import Ints


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The sampling rows of a step, on the device: those of the plan in its order, then padding, if any."""

    rows: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64, of the token that is to be drawn; the first after a prompt of n has n


Edit = Callable[[torch.Tensor, SampleBatch], None]
"""Device: change the logits [S, vocabulary] in place."""

Drawn = Callable[[torch.Tensor, SampleBatch], None]
"""Device: learn the tokens [S] int64 that were drawn."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage does on the device in one step.

    The closures run later, on the stream, when the host may be steps ahead: they capture what they need and read no
    field that `apply` changes.
    """

    edit: Edit
    drawn: Drawn | None = None  # for stages that keep account of the output


class Stage(RowState, Protocol):
    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        """Host: the work for these sampling rows in this step; None if none of them asks for it.

        Called exactly once a step, after `apply` and `flush`, with every row for which a token is drawn.
        """
