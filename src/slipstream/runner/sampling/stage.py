"""Stage: a RowState that edits logits before a token is drawn.

A new stage is a file with a class of this shape, and an entry in the list of stages in `sampler.py`.
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
    """The sampling rows of a step on the device, in the plan's order, then padding rows, if any."""

    rows: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64, of the token to draw; the first token after a prompt of n tokens has n


Edit = Callable[[torch.Tensor, SampleBatch], None]
"""Device: edits the logits [S, vocabulary] in place."""

Drawn = Callable[[torch.Tensor, SampleBatch], None]
"""Device: receives the drawn tokens [S] int64."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """The device work of a stage in one step.

    It runs later, on the stream, when the host may be steps ahead: it must not read fields that `apply` changes.
    """

    edit: Edit | None
    drawn: Drawn | None = None  # for stages that depend on the output


@dataclass(frozen=True, slots=True)
class ByRow:
    """Work that is the same from step to step: it reads each row's parameters from tables on the device, and does not
    change rows that do not use the stage. So it can be captured, and replayed for any rows under the same key."""

    key: Hashable  # differs for other work of the stage, for example on a table of another size
    work: StageWork


class Stage(RowState, Protocol):
    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        """Host: the work for these sampling rows; None if none of them uses the stage.

        Called once per step with all sampling rows, after `apply` and `flush`, unless `by_row` is called instead.
        """

    def is_used_by(self, rows: Ints) -> bool:
        """Host: whether any of these sampling rows uses the stage. Changes nothing."""


class ByRowStage(Stage, Protocol):
    """A stage whose work can be captured."""

    def by_row(self, rows: Ints) -> ByRow:
        """Host: the work for these sampling rows, some of which use the stage."""
