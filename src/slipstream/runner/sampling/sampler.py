"""Sampler: the sampling stages in their order, then the draw. The host never reads a token here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.config.config import MAX_STEP_LOGPROBS
from slipstream.contracts.step import DrawEdits, Ints, StepMasks, StepPlan
from slipstream.device.collectives import Group
from slipstream.device.device import Device
from slipstream.ops.sampling import Accepted, DrawnTokens, TopLogprobs
from slipstream.params.sampling import MAX_PACKED_LOGPROBS
from slipstream.runner.features import StepFeature
from slipstream.runner.graphs import GraphPool
from slipstream.runner.input_batch import ArrayCache
from slipstream.runner.rows import RowState
from slipstream.runner.sampling.bias import HostBias, HostLogits, LogitBias
from slipstream.runner.sampling.draw import Draw, DrawWork, Scale, Truncate, greedy_by_row
from slipstream.runner.sampling.forbid import BadWords, MinTokens
from slipstream.runner.sampling.grammar_mask import GrammarMask
from slipstream.runner.sampling.logprobs import (
    LogprobsWork,
    ReportedValues,
    RequestedLogprobs,
    RequestedLogprobsWork,
    WideLogprobs,
    WideLogprobsWork,
)
from slipstream.runner.sampling.penalties import Penalties
from slipstream.runner.sampling.stage import DrawBatch, Stage, StageWork
from slipstream.runner.sampling.thinking_budget import ThinkingBudget
from slipstream.runner.staging import Upload

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}

_WIDTHS = (0, 1, 5, 10, 20, MAX_PACKED_LOGPROBS)
"""Sizes of the top-k logprobs that a captured graph reports: the next larger one is used, to need few graphs."""


Accept = Callable[[DrawnTokens], Accepted]
"""Device: accepts drawn tokens while they equal the drafts."""


@dataclass(frozen=True, slots=True)
class DrawOutput:
    """The tokens that a step drew, on the device."""

    tokens: torch.Tensor  # [S] int64
    # [S] bool: the row's logits held NaN, or no token was left; its token is 0. With drafts, of reached draws only
    failed: torch.Tensor
    logprobs: TopLogprobs | None  # the values of `logprobs_mode`
    requested: torch.Tensor | None = None  # logprobs of requested ids, for rows that have them
    wide: TopLogprobs | None = None  # logprobs of wide rows
    kept: torch.Tensor | None = None  # [S] bool: accepted tokens; None: all


@dataclass(slots=True)  # created in every step: a frozen one costs twice as much
class SamplingWork:
    """The sampling of one step. The host knows its shape, the device runs it."""

    works: list[StageWork]
    draw: DrawWork
    logprobs: LogprobsWork | None
    requested: RequestedLogprobsWork | None = None
    wide: WideLogprobsWork | None = None

    def __call__(self, logits: torch.Tensor, batch: DrawBatch, accept: Accept | None = None) -> DrawOutput:
        """Device: draw tokens from logits [S, vocabulary], which may be overwritten. `accept`: needed with drafts."""
        raw = logits if self.logprobs is None else self.logprobs.keep(logits)
        for work in self.works:
            if work.edit is not None:
                work.edit(logits, batch)
        # a row may also fail because its parameters contradict each other and leave no token
        tokens, failed = self.draw(logits, batch)
        kept = None
        if batch.offsets is not None:
            assert accept is not None, "drafts must be accepted or rejected"
            _, kept, failed = accept(DrawnTokens(batch.rows, batch.offsets, batch.positions, tokens, failed))
        for work in self.works:
            if work.drawn is not None:
                work.drawn(tokens, batch, kept)
        if self.logprobs is None:
            return DrawOutput(tokens, failed, None, None, None, kept)
        requested = None if self.requested is None else self.requested.compute(raw)
        wide = None if self.wide is None else self.wide.compute(raw, tokens)
        return DrawOutput(tokens, failed, self.logprobs.compute(raw, tokens), requested, wide, kept)


class Sampler(StepFeature):
    """A feature made of RowStates. A stage that no sampling row of a step uses adds no work to the step."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: Device,
        logits_dtype: torch.dtype,
        max_ids: int = MAX_STEP_LOGPROBS,
        max_drafts: int = 0,
        max_step_drafts: int = 0,
        logprobs_mode: str = "raw_logprobs",
        graphs: GraphPool | None = None,
    ) -> None:
        """`num_rows` includes the padding row at the end, which is never admitted. `max_ids`: maximum size of each kind
        of list over all rows. `max_drafts`: of a row in one step; `max_step_drafts`: of all rows. `graphs`: for
        the copies of masks."""
        assert logits_dtype in _NUMPY, f"logits are sampled in float32 or float64, not {logits_dtype}"
        dtype = _NUMPY[logits_dtype]
        self.vocab_size = vocab_size
        self._graphs = graphs
        self._masks = GrammarMask(num_rows, vocab_size, device, max_drafts, max_step_drafts)
        self._biases = HostBias(num_rows, device)
        self._raw = HostLogits(num_rows, is_scaled=False)
        self._scaled = HostLogits(num_rows, is_scaled=True)
        self._scale = Scale(num_rows, device, dtype)
        self._min_tokens = MinTokens(num_rows, vocab_size, device, max_ids)
        thinking = ThinkingBudget(num_rows, vocab_size, device)
        self._of_output: list[Stage] = [  # stages that depend on the tokens before
            thinking,
            Penalties(num_rows, vocab_size, device, dtype),
            BadWords(num_rows, device, max_ids),
        ]
        self.stages: list[Stage] = [  # in the order in which they edit the logits
            self._masks,
            thinking,
            self._biases,
            LogitBias(num_rows, vocab_size, device, dtype, logits_dtype),
            self._min_tokens,
            self._raw,
            *self._of_output[1:],
            self._scale,
            self._scaled,
            Truncate(num_rows, vocab_size, device, dtype),
        ]
        self.draw = Draw(num_rows, device)
        self._values = ReportedValues.of_mode(logprobs_mode)
        self.requested = RequestedLogprobs(num_rows, device, max_ids, self._values)
        self.wide = WideLogprobs(num_rows, self._values)
        self._states: list[RowState] = [*self.stages, self.draw, self.requested, self.wide]
        self._changed = False  # whether this step admits or releases a generation request
        # what was found for these sampling rows, which plans share as long as the same rows decode
        self._late_rows: ArrayCache[bool] = ArrayCache()
        self._readers: ArrayCache[bool] = ArrayCache()
        self._kept: ArrayCache[tuple[int | None, Replayed | None]] = ArrayCache()
        self._generating: set[int] = set()  # rows of generation requests

    def connect_ranks(self, group: Group) -> None:
        """With several ranks: the group over which edits of logits processors are sent."""
        self._raw.group = self._scaled.group = group

    def apply(self, plan: StepPlan) -> None:
        released = plan.released.tolist()
        self._changed = bool(plan.admitted) or not self._generating.isdisjoint(released)
        if self._changed:
            for found in (self._late_rows, self._readers, self._kept):
                found.clear()
            for state in self._states:
                state.apply(plan)
            self._generating.difference_update(released)
            self._generating.update([admission.row for admission in plan.admitted])

    def flush(self, upload: Upload) -> None:
        if self._changed:
            for state in self._states:
                state.flush(upload)

    def needs_late(self, plan: StepPlan) -> bool:
        """Host: whether a sampling row of this step needs data that come with `send`."""
        rows = _sampling_rows(plan)
        found = self._late_rows.get(rows)
        if found is None:
            stages = (self._masks, self._biases, self._raw, self._scaled)
            found = self._late_rows.put(rows, any(stage.is_used_by(rows) for stage in stages))
        return found

    def open_masks(self, num_masks: int) -> StepMasks:
        """Host: see `GrammarMask.open`."""
        return self._masks.open(num_masks)

    def send(self, late: DrawEdits) -> None:
        """Host: what the step whose forward was launched last needs from the host for its draws."""
        self._masks.send(late, self._graphs)
        for stage in (self._biases, self._raw, self._scaled):
            stage.send(late)

    def reads_output(self, plan: StepPlan) -> bool:
        """Host: whether a stage of a sampling row depends on the tokens before, drafts included."""
        rows = _sampling_rows(plan)
        found = self._readers.get(rows)
        if found is None:
            found = self._readers.put(rows, any(stage.is_used_by(rows) for stage in self._of_output))
        return found

    def prepare(self, plan: StepPlan, upload: Upload) -> SamplingWork:
        """Host, after `apply` and `flush`: this step's device work, for logits of the plan's sampling rows."""
        rows, num_logprobs = _sampling_rows(plan), plan.num_logprobs
        works = [work for stage in self.stages if (work := stage.prepare(rows, upload)) is not None]
        draw = self.draw.prepare(rows, upload)
        if num_logprobs is None:
            return SamplingWork(works, draw, None)
        logprobs = LogprobsWork(num_logprobs, bool(works), self._values)
        return SamplingWork(
            works, draw, logprobs, self.requested.prepare(rows, upload), self.wide.prepare(rows, upload)
        )

    def prepare_by_row(self, plan: StepPlan) -> Replayed | None:
        """Host: like `prepare`, as work that uploads nothing and can be captured; None if a feature of a row cannot be
        captured."""
        rows, num_logprobs = _sampling_rows(plan), plan.num_logprobs
        found = self._kept.get(rows)
        if found is not None and found[0] == num_logprobs:
            return found[1]
        counts = self._min_tokens.is_used_by(rows)  # the steps that still need it
        replayed = self._make_by_row(rows, num_logprobs)
        if not counts:
            self._kept.put(rows, (num_logprobs, replayed))
        return replayed

    def _make_by_row(self, rows: Ints, num_logprobs: int | None) -> Replayed | None:
        if num_logprobs is not None and (self.wide.is_used_by(rows) or self.requested.entries.is_used_by(rows)):
            return None
        used = [stage for stage in self.stages if stage.is_used_by(rows)]
        if used and num_logprobs is not None and self._values.is_processed:
            return None  # a captured draw applies temperature and limits as it reads the logits, which stay raw
        if not all(stage.can_capture(rows) for stage in used):
            return None
        parts = [stage.by_row(rows) for stage in used]
        penalty_of = next((part.penalty for part in parts if part.penalty is not None), None)
        mask_of = next((part.mask for part in parts if part.mask is not None), None)
        if is_random := self.draw.is_used_by(rows):
            limits = next((part.limits for part in parts if part.limits is not None), None)
            if limits is not None and mask_of is not None:  # limits are found in several passes over the logits
                parts, mask_of = [part.with_masked_logits() for part in parts], None
            draw = self.draw.by_row(self._scale, limits, penalty_of, mask_of)
        else:
            draw = greedy_by_row(penalty_of, mask_of)
        if num_logprobs is not None:
            width = next(width for width in _WIDTHS if width >= num_logprobs)
            num_logprobs = min(width, self.vocab_size)
        edits = any(part.work.edit is not None for part in parts)
        logprobs = None if num_logprobs is None else LogprobsWork(num_logprobs, edits, self._values)
        key = (is_random, num_logprobs, *(part.key for part in parts if part.key is not None))
        sample = SamplingWork([part.work for part in parts if part.key is not None], draw, logprobs)
        return Replayed(key, any(part.needs_sampling_dtype for part in parts), num_logprobs, sample)


@dataclass(slots=True)
class Replayed:
    """The sampling of one step as work that is the same for all steps of this key and number of rows."""

    key: Hashable
    needs_sampling_dtype: bool  # whether a stage computes with the logits; else they may have the model's dtype
    num_logprobs: int | None  # likeliest tokens reported; None: no logprobs
    sample: SamplingWork


def _sampling_rows(plan: StepPlan) -> Ints:
    # without host tokens all rows decode, and all draw
    return plan.rows[plan.num_drawn > 0] if plan.tokens.size else plan.rows
