"""Drafter: proposes the tokens that a row will probably draw next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.contracts.step import StepPlan
from slipstream.nn.context import ForwardContext
from slipstream.runner.batch.input_batch import Size
from slipstream.runner.batch.staging import Upload

Follow = Callable[[ForwardContext, torch.Tensor], None]
"""Device: the drafter's pass over the tokens of a step. Takes the target's context and its hidden states."""

CatchUp = Callable[[], None]
"""Device: the drafter's pass over tokens of earlier steps, after the target's forward."""


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The draws of a step. The row table has each row's last token and length already."""

    rows: torch.Tensor  # device [S] int64; the rows of a step with drafts repeat
    offsets: torch.Tensor | None  # device [S] int64, index of the draw among its row's; None: each row has one draw
    positions: torch.Tensor  # device [S] int64, of the drawn token; arbitrary for padding
    tokens: torch.Tensor  # device [S] int64, as drawn, accepted or not
    hidden: torch.Tensor  # device [S, hidden], of the position before the drawn token
    max_length: int  # host: at least the number of tokens of every row
    num_rows: int  # host: at least the number of rows, each counted once
    returned: torch.Tensor | None = None  # device [S, drafts] int64: memory for drafts that leave with the results


class Drafter(Protocol):
    """The last part of a step's head. Drafts never change tokens: a draft counts only if the row then draws it."""

    # Also runs in steps that need no drafts, with `num_drafts` 0, to store what later steps read; unless plans let it
    # catch up later.
    always_runs: bool
    reads_hidden: bool  # reads the hidden states of all tokens of a step
    fills_returned: bool  # writes drafts to `DraftBatch.returned` too, at the first draw of each row

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        """Device: write `num_drafts` drafts of each row to `RowTable.next_tokens`, after the token that the row drew
        last; -1: no draft. May be captured in a graph: reads no device value on the host."""


class ForwardDrafter(Drafter, Protocol):
    """A drafter that also takes part in the forward of steps: it computes the tokens of prompts too."""

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None) -> Follow | None:
        """Host: the drafter's part of a step's forward; None if the step needs none."""

    def prepare_catch_up(self, plan: StepPlan, upload: Upload) -> CatchUp | None:
        """Host: the drafter's pass over positions of earlier steps and of prompts; None if there are none."""
