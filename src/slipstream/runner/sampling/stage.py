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
    """The sampling rows of a step, on the device. S rows, in the plan's order."""

    rows: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64, of the token that is to be drawn; the first after a prompt of n has n


Edit = Callable[[torch.Tensor, SampleBatch], torch.Tensor]
"""Device: logits [S, vocabulary] to logits, in place or new."""


class Stage(RowState, Protocol):
    def edit(self, rows: Ints, upload: Upload) -> Edit | None:
        """Host: what to do with the logits of these sampling rows in this step; None if none of them asks for it.

        Called once a step, after `apply` and `flush`. The returned closure runs later, on the stream, when the host
        may be a step ahead: it captures what it needs and reads no field that `apply` changes.
        """
