"""Head: turns the hidden states of a step into results."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch

from slipstream.contracts.step import StepPlan
from slipstream.runner.batch.input_batch import Gathered, Size
from slipstream.runner.batch.staging import Upload
from slipstream.runner.results import Sent, StepHandle

Finish = Callable[[Gathered, torch.Tensor], None]


class CapturedDraw(NamedTuple):
    """The work of a head that can be captured together with the forward before it."""

    key: Hashable
    draw: Callable[[Gathered, torch.Tensor], torch.Tensor]  # returns results at a fixed address
    put: Callable[[torch.Tensor], None]  # to where this step's results are copied from; not captured


class Head:
    """One step's head: its device work, and how its results are read once copied; None if it has no results."""

    def __init__(
        self, run: Finish, handle: Callable[[Sent], StepHandle] | None, captured: CapturedDraw | None = None
    ) -> None:
        """`captured`: the same work as `run` for steps without data that come after the forward's launch; None: it
        cannot be captured with the forward."""
        self.run = run
        self.handle = handle
        self.captured = captured


class HeadMaker(Protocol):
    """Makes a head for each step."""

    def wants_all(self, plan: StepPlan) -> bool:
        """Host: whether the head reads hidden states other than that of each row's last token."""

    def prepare(
        self, plan: StepPlan, upload: Upload, size: Size | None = None, *, only_last: bool = False
    ) -> Head | None:
        """Host: upload what the head needs; None if this step needs no head. `size`: what the forward is padded to.
        `only_last`: the hidden states are those of each row's last token, not of all tokens."""
