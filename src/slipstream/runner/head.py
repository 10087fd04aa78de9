"""Head: what turns one step's hidden states into results."""

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
    """One step's head: its closure for the device, and how its results are read once sent; None if it has none."""

    def __init__(self, run: Finish, leave: Callable[[Sent], StepHandle] | None) -> None:
        self.run = run
        self.leave = leave


class HeadMaker(Protocol):
    """What the runner asks for a head of each step."""

    def wants_all(self, plan: StepPlan) -> bool:
        """Host: whether the head reads other hidden states than that of each row's last token."""

    def prepare(
        self, plan: StepPlan, upload: Upload, size: Size | None = None, *, only_last: bool = False
    ) -> Head | None:
        """Host: stage what the head needs; None when this step needs none. `size`: what the body is padded to.
        `only_last`: the hidden states are those of each row's last token, not of all tokens."""
