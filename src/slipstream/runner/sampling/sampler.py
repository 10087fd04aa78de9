"""Sampler: the ordered stages, then one draw. The host never looks at a token."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.config.config import MAX_REPORTED_LOGPROBS
from slipstream.device.device import Device
from slipstream.ops.sample import TopLogprobs
from slipstream.params import MAX_PACKED_LOGPROBS
from slipstream.runner.batch.row_state import RowState
from slipstream.runner.batch.staging import Upload
from slipstream.runner.sampling.bad_words import BadWords
from slipstream.runner.sampling.bias import Bias
from slipstream.runner.sampling.draw import Draw, DrawWork, greedy_by_row, no_penalty
from slipstream.runner.sampling.logprobs import Logprobs, RequestedLogprobs, RequestedWork, WideLogprobs, WideWork
from slipstream.runner.sampling.min_tokens import MinTokens
from slipstream.runner.sampling.penalties import Penalties
from slipstream.runner.sampling.scale import Scale
from slipstream.runner.sampling.stage import ByRowStage, SampleBatch, Stage, StageWork
from slipstream.runner.sampling.truncate import Truncate
from slipstream.step import Ints, StepPlan

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}

_WIDTHS = (0, 1, 5, 10, 20, MAX_PACKED_LOGPROBS)
"""Likeliest tokens that replayed work may tell: so many as are wanted, or a few more, so that few graphs serve all."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What a step drew, on the device."""

    tokens: torch.Tensor  # [S] int64
    failed: torch.Tensor  # [S] bool: the row's logits held NaN, or no token was left; its token is 0
    logprobs: TopLogprobs | None  # of the raw logits
    given: torch.Tensor | None = None  # likewise, for rows that gave ids
    long: TopLogprobs | None = None  # likewise, for rows that want very many


@dataclass(slots=True)  # made in every step: a frozen one costs twice as much
class Sample:
    """One step's sampling. The host knows its shape, the device runs it."""

    works: list[StageWork]
    draw: DrawWork
    logprobs: Logprobs | None
    given: RequestedWork | None = None
    long: WideWork | None = None

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> SampleOutput:
        """Device: logits [S, vocabulary] to tokens. The logits may be changed."""
        raw = logits if self.logprobs is None else self.logprobs.keep(logits)
        for work in self.works:
            if work.edit is not None:
                work.edit(logits, batch)
        # a row may fail by its parameters too: they can contradict each other and leave nothing to draw
        tokens, failed = self.draw(logits, batch)
        for work in self.works:
            if work.drawn is not None:
                work.drawn(tokens, batch)
        if self.logprobs is None:
            return SampleOutput(tokens, failed, None)
        given = None if self.given is None else self.given.report(raw)
        long = None if self.long is None else self.long.report(raw, tokens)
        return SampleOutput(tokens, failed, self.logprobs.report(raw, tokens), given, long)


class Sampler:
    """A RowState made of RowStates. A stage that no sampling row of a step uses does nothing in it."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: Device,
        logits_dtype: torch.dtype,
        max_ids: int = MAX_REPORTED_LOGPROBS,
    ) -> None:
        """`num_rows` counts the null row at the end, which pads and is never admitted. `max_ids`: in lists of one
        kind, of all rows together."""
        assert logits_dtype in _NUMPY, f"logits are sampled in float32 or float64, not {logits_dtype}"
        dtype = _NUMPY[logits_dtype]
        bias = Bias(num_rows, vocab_size, device, dtype, logits_dtype)
        min_tokens = MinTokens(num_rows, vocab_size, device, max_ids)
        penalties = Penalties(num_rows, vocab_size, device, dtype)
        bad_words = BadWords(num_rows, device, max_ids)
        scale = Scale(num_rows, device, dtype)
        truncate = Truncate(num_rows, vocab_size, device, dtype)
        self.stages: list[Stage] = [bias, min_tokens, penalties, bad_words, scale, truncate]
        self._bias, self._min_tokens, self._penalties = bias, min_tokens, penalties
        self._scale, self._truncate = scale, truncate
        # stages that `prepare_by_row` handles; a step in which a row asks for another one runs eagerly
        self._captured: tuple[Stage, ...] = (bias, min_tokens, penalties, scale, truncate)
        self.draw = Draw(num_rows, device)
        self.given = RequestedLogprobs(num_rows, device, max_ids)
        self.long = WideLogprobs(num_rows)
        self._states: list[RowState] = [*self.stages, self.draw, self.given, self.long]
        self._changed = False  # whether anyone came or went in this step
        self._seated: set[int] = set()  # rows of texts; others pool

    def apply(self, plan: StepPlan) -> None:
        released = plan.released.tolist()
        self._changed = bool(plan.admitted) or not self._seated.isdisjoint(released)
        if self._changed:
            for state in self._states:
                state.apply(plan)
            self._seated.difference_update(released)
            self._seated.update([admission.row for admission in plan.admitted])

    def flush(self, upload: Upload) -> None:
        if self._changed:
            for state in self._states:
                state.flush(upload)

    def prepare(self, plan: StepPlan, upload: Upload) -> Sample:
        """Host, after `apply` and `flush`: this step's device work, for logits of the plan's sampling rows."""
        rows, num_logprobs = _sampling_rows(plan), plan.num_logprobs
        works = [work for stage in self.stages if (work := stage.prepare(rows, upload)) is not None]
        draw = self.draw.prepare(rows, upload)
        if num_logprobs is None:
            return Sample(works, draw, None)
        logprobs = Logprobs(num_logprobs, edited=bool(works))
        return Sample(works, draw, logprobs, self.given.prepare(rows, upload), self.long.prepare(rows, upload))

    def prepare_by_row(self, plan: StepPlan) -> Replayed | None:
        """Host: as `prepare`, as work that may be captured and stages nothing; None if a row asks for what cannot."""
        rows, num_logprobs = _sampling_rows(plan), plan.num_logprobs
        if num_logprobs is not None and (self.long.asks(rows) or self.given.slots.asks(rows)):
            return None
        if any(stage not in self._captured and stage.asks(rows) for stage in self.stages):
            return None
        if self._min_tokens.asks(rows) and not self._min_tokens.can_capture(rows):
            return None
        stages: tuple[ByRowStage, ...] = (self._bias, self._min_tokens, self._penalties)
        works = [stage.by_row(rows) for stage in stages if stage.asks(rows)]
        penalty_of = self._penalties.penalty if self._penalties.asks(rows) else no_penalty
        if self.draw.asks(rows):
            cuts = self._truncate.asks(rows)
            draw = self.draw.by_row(self._scale, self._truncate if cuts else None, penalty_of)
            kind = "cut" if cuts else "random"
        else:
            draw, kind = greedy_by_row(penalty_of), "greedy"
        if num_logprobs is not None:
            width = next(width for width in _WIDTHS if width >= num_logprobs)
            num_logprobs = min(width, self._truncate.vocab_size)
        edits = any(work.work.edit is not None for work in works)
        logprobs = None if num_logprobs is None else Logprobs(num_logprobs, edited=edits)
        key = (kind, num_logprobs, *(work.key for work in works))
        sample = Sample([work.work for work in works], draw, logprobs)
        return Replayed(key, self._bias.asks(rows), num_logprobs, sample)


@dataclass(slots=True)
class Replayed:
    """One step's sampling, the same for all steps of this key and number of rows."""

    key: Hashable
    adds: bool  # whether something is added to logits in place, which wants them in the dtype that is sampled from
    num_logprobs: int | None  # likeliest tokens that it tells, if any
    sample: Sample


def _sampling_rows(plan: StepPlan) -> Ints:
    # without given tokens all rows decode, and all sample
    return plan.rows[plan.num_drawn > 0] if plan.tokens.size else plan.rows
