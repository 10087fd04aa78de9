"""Stage: a RowState that edits logits before a token is drawn.

To add one: a file with a class of this shape, and its place in the order in `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
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

    edit: Edit | None
    drawn: Drawn | None = None  # for stages that keep account of the output


@dataclass(frozen=True, slots=True)
class ByRow:
    """Work that is the same from step to step: it finds what each row asks for in tables on the device, and leaves
    alone the rows that ask for nothing. So it may be captured, and be replayed for any rows under the same key."""

    key: Hashable  # tells it from other work of the stage, such as that on a table of another size
    work: StageWork


class Stage(RowState, Protocol):
    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        """Host: the work for these sampling rows in this step; None if none of them asks for it.

        Called once a step, unless `by_row` is, after `apply` and `flush`, with every row for which a token is drawn.
        """

    def asks(self, rows: Ints) -> bool:
        """Host: whether any of these sampling rows asks for this stage. Changes nothing."""


class ByRowStage(Stage, Protocol):
    """A stage whose work can be captured."""

    def by_row(self, rows: Ints) -> ByRow:
        """Host: the work for these sampling rows, some of which ask for it."""
