"""Sampler: the ordered stages, then one draw. The host never looks at a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.ops.sample import Choice, TopLogprobs
from slipstream.runner.batch.row_state import RowState
from slipstream.runner.batch.staging import Upload
from slipstream.runner.sampling.bad_words import BadWords
from slipstream.runner.sampling.bias import Bias
from slipstream.runner.sampling.draw import Draw, greedy
from slipstream.runner.sampling.logprobs import GivenLogprobs, GivenWork, Logprobs
from slipstream.runner.sampling.min_tokens import MinTokens
from slipstream.runner.sampling.penalties import Penalties
from slipstream.runner.sampling.scale import Scale
from slipstream.runner.sampling.stage import SampleBatch, Stage, StageWork
from slipstream.runner.sampling.truncate import Truncate
from slipstream.step import StepPlan

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What a step drew, on the device."""

    tokens: torch.Tensor  # [S] int64
    failed: torch.Tensor  # [S] bool: the row's logits held NaN, or no token was left; its token is 0
    logprobs: TopLogprobs | None  # of the raw logits
    given: torch.Tensor | None = None  # likewise, for rows that gave ids


@dataclass(slots=True)  # made in every step: a frozen one costs twice as much
class Sample:
    """One step's sampling. The host knows its shape, the device runs it."""

    works: list[StageWork]
    draw: Callable[[torch.Tensor, SampleBatch], Choice]
    logprobs: Logprobs | None
    given: GivenWork | None

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest tokens are all that is asked for."""
        return self.draw is greedy and not self.works and self.logprobs is None

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> SampleOutput:
        """Device: logits [S, vocabulary] to tokens. The logits may be changed."""
        raw = logits if self.logprobs is None else self.logprobs.keep(logits)
        for work in self.works:
            work.edit(logits, batch)
        # a row may fail by its parameters too: they can contradict each other and leave nothing to draw
        tokens, failed = self.draw(logits, batch)
        for work in self.works:
            if work.drawn is not None:
                work.drawn(tokens, batch)
        if self.logprobs is None:
            return SampleOutput(tokens, failed, None)
        given = None if self.given is None else self.given.report(raw)
        return SampleOutput(tokens, failed, self.logprobs.report(raw, tokens), given)


class Sampler:
    """A RowState made of RowStates. A stage that no sampling row of a step uses does nothing in it."""

    def __init__(self, num_rows: int, vocab_size: int, device: Device, logits_dtype: torch.dtype) -> None:
        """`num_rows` counts the null row at the end, which pads and is never admitted."""
        assert logits_dtype in _NUMPY, f"logits are sampled in float32 or float64, not {logits_dtype}"
        dtype = _NUMPY[logits_dtype]
        self.stages: list[Stage] = [
            Bias(num_rows, vocab_size, device, dtype, logits_dtype),
            MinTokens(num_rows, vocab_size, device),
            Penalties(num_rows, vocab_size, device, dtype),
            BadWords(num_rows, device),
            Scale(num_rows, device, dtype),
            Truncate(num_rows, vocab_size, device, dtype),
        ]
        self.draw = Draw(num_rows, device)
        self.given = GivenLogprobs(num_rows, device)
        self._states: list[RowState] = [*self.stages, self.draw, self.given]
        self._changed = False  # whether anyone came or went in this step

    def apply(self, plan: StepPlan) -> None:
        self._changed = bool(plan.admitted) or len(plan.released) > 0
        if self._changed:
            for state in self._states:
                state.apply(plan)

    def flush(self, upload: Upload) -> None:
        if self._changed:
            for state in self._states:
                state.flush(upload)

    def prepare(self, plan: StepPlan, upload: Upload) -> Sample:
        """Host, after `apply` and `flush`: this step's device work, for logits of the plan's sampling rows."""
        rows, num_logprobs = plan.rows, plan.num_logprobs
        if plan.tokens.size:  # else all rows decode, and all sample
            rows = rows[plan.samples]
        works = [work for stage in self.stages if (work := stage.prepare(rows, upload)) is not None]
        draw = self.draw.prepare(rows, upload)
        if num_logprobs is None:
            return Sample(works, draw, None, None)
        return Sample(works, draw, Logprobs(num_logprobs, edited=bool(works)), self.given.prepare(rows, upload))
