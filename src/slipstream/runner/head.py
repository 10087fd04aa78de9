"""Head: turns the hidden states of a step into results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from slipstream.runner.batch.input_batch import Gathered, Size
from slipstream.runner.batch.staging import Upload
from slipstream.runner.results import Sent, StepHandle
from slipstream.step import StepPlan

Finish = Callable[[Gathered, torch.Tensor], None]


class Head:
    """One step's head: its device work, and how its results are read once copied; None if it has no results."""

    def __init__(self, run: Finish, handle: Callable[[Sent], StepHandle] | None) -> None:
        self.run = run
        self.handle = handle


class HeadMaker(Protocol):
    """Makes a head for each step."""

    def wants_all(self, plan: StepPlan) -> bool:
        """Host: whether the head reads hidden states other than that of each row's last token."""

    def prepare(
        self, plan: StepPlan, upload: Upload, size: Size | None = None, *, only_last: bool = False
    ) -> Head | None:
        """Host: upload what the head needs; None if this step needs no head. `size`: what the forward is padded to.
        `only_last`: the hidden states are those of each row's last token, not of all tokens."""
