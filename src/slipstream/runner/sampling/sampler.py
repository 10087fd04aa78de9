"""Sampler: the sampling stages in their order, then the draw. The host never reads a token here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.config.config import MAX_STEP_LOGPROBS
from slipstream.contracts.step import Bools, DrawEdits, Ints, StepMasks, StepPlan
from slipstream.device.collectives import Group
from slipstream.device.device import Device
from slipstream.ops.sampling import Accepted, DrawnTokens, RowHints, TopLogprobs
from slipstream.params.sampling import MAX_PACKED_LOGPROBS
from slipstream.runner.features import StepFeature
from slipstream.runner.graphs import GraphPool
from slipstream.runner.input_batch import ArrayCache
from slipstream.runner.rows import RowState
from slipstream.runner.sampling.bias import HostBias, HostLogits, LogitBias
from slipstream.runner.sampling.draw import Draw, DrawWork, Truncate, apply_to_logits
from slipstream.runner.sampling.forbid import BadWords, MinTokens
from slipstream.runner.sampling.grammar_mask import GrammarMask
from slipstream.runner.sampling.logprobs import ReportedValues, RequestedLogprobs, SomeRows, WideLogprobs
from slipstream.runner.sampling.penalties import Penalties
from slipstream.runner.sampling.stage import DrawBatch, Drawn, Edit, Stage, StageWork
from slipstream.runner.sampling.thinking_budget import ThinkingBudget
from slipstream.runner.staging import Upload

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}

_WIDTHS = (0, 1, 5, 10, 20, MAX_PACKED_LOGPROBS)
"""Sizes of the top-k logprobs that a captured graph returns: the next larger one is used, to need few graphs."""


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


Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """The sampling of one step, and of later steps with the same rows. The host knows its shape, the device runs it."""

    key: Hashable | None  # of captured work: the same for all steps of this key and number of rows; None: eager
    needs_sampling_dtype: bool  # whether a stage computes with the logits; else they may have the model's dtype
    num_logprobs: int | None  # likeliest tokens reported; None: no logprobs
    keeps_raw: bool  # the reported logits are those before the edits, which are in place
    indices: Sequence[Indices]  # that an eager step uploads; the device gets them in this order
    hints: Callable[[Sequence[torch.Tensor]], RowHints] | None  # device: from these indices; None: captured
    edits: Sequence[tuple[Edit, int | None]]  # and which of the indices are those of the draws to edit; None: all
    drawn: Sequence[Drawn]
    draw: DrawWork
    values: ReportedValues
    requested: SomeRows[torch.Tensor] | None = None
    wide: SomeRows[TopLogprobs] | None = None

    def __call__(
        self, logits: torch.Tensor, batch: DrawBatch, indices: Sequence[torch.Tensor] = (), accept: Accept | None = None
    ) -> DrawOutput:
        """Device: draw tokens from logits [S, vocabulary], which may be overwritten. `accept`: needed with drafts."""
        reported = logits.clone() if self.keeps_raw else logits
        if self.hints is not None:
            batch = batch._replace(hints=self.hints(indices))
        for edit, number in self.edits:
            edit(logits, batch if number is None else batch.at(indices[number]))
        # a row may also fail because its parameters contradict each other and leave no token
        tokens, failed = self.draw(logits, batch)
        kept = None
        if batch.offsets is not None:
            assert accept is not None, "drafts must be accepted or rejected"
            _, kept, failed = accept(DrawnTokens(batch.rows, batch.offsets, batch.positions, tokens, failed))
        for drawn in self.drawn:
            drawn(tokens, batch, kept)
        if self.num_logprobs is None:
            return DrawOutput(tokens, failed, None, None, None, kept)
        requested = None if self.requested is None else self.requested.compute(reported, tokens, indices)
        wide = None if self.wide is None else self.wide.compute(reported, tokens, indices)
        logprobs = self.values.top(reported, tokens, self.num_logprobs)
        return DrawOutput(tokens, failed, logprobs, requested, wide, kept)


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
        self._draw = Draw(num_rows, device, dtype)
        self._truncate = Truncate(num_rows, vocab_size, device, dtype)
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
            self._draw,
            self._scaled,
            self._truncate,
        ]
        self._values = ReportedValues.of_mode(logprobs_mode)
        self.requested = RequestedLogprobs(num_rows, device, max_ids, self._values)
        self.wide = WideLogprobs(num_rows, self._values)
        self._states: list[RowState] = [*self.stages, self.requested, self.wide]
        self._changed = False  # whether this step admits or releases a generation request
        # what was found for these sampling rows, which plans share as long as the same rows decode
        self._late_rows: ArrayCache[bool] = ArrayCache()
        self._readers: ArrayCache[bool] = ArrayCache()
        self._kept: ArrayCache[tuple[tuple[int | None, bool], SamplingWork]] = ArrayCache()
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

    def prepare(self, plan: StepPlan, *, capture: bool = False) -> SamplingWork:
        """Host, after `apply` and `flush`: this step's device work, for logits of the plan's sampling rows. `capture`:
        it is captured if it can be; then its logits may have padding rows."""
        rows, asked = _sampling_rows(plan), (plan.num_logprobs, capture)
        found = self._kept.get(rows)
        if found is not None and found[0] == asked:
            return found[1]
        used = [stage for stage in self.stages if stage.is_used_by(rows)]
        parts = [stage.work(rows) for stage in used]
        work = self._make(rows, used, parts, plan.num_logprobs, capture=capture)
        # the others count the steps, or belong to one
        if self._min_tokens not in used and all(part.key is not None for part in parts):
            self._kept.put(rows, (asked, work))
        return work

    def _make(
        self, rows: Ints, used: list[Stage], parts: list[StageWork], num_logprobs: int | None, *, capture: bool
    ) -> SamplingWork:
        has_logprobs, is_random = num_logprobs is not None, self._draw in used
        is_scaled = is_random and self._draw.is_scaled(rows)
        # whether logits are reported that have all edits, those of the draw too
        reads = has_logprobs and self._values.is_processed and (is_scaled or len(parts) > is_random)
        if has_logprobs and (self.wide.is_used_by(rows) or self.requested.is_used_by(rows)):
            capture = False  # the shapes of their results depend on the rows
        capture = capture and not reads and all(part.key is not None for part in parts)
        indices: list[Indices] = []

        def add(index: Indices) -> int:
            indices.append(index)
            return len(indices) - 1

        def add_users(users: Bools | None) -> int | None:
            return None if capture or users is None else add(np.flatnonzero(users))

        def add_some(users: Bools | None) -> int | None:
            return None if users is None or users.all() else add_users(users)

        random = add_some(self._draw.random[rows]) if is_random else None
        order: list[tuple[int, int]] = []
        if self._truncate in used and not capture:
            order = [(add(index), max_k) for index, max_k in self._truncate.order(rows)]
        for number in reversed(range(len(parts))):
            part = parts[number]
            # limits are found in several passes over the logits
            if reads or (self._truncate in used and part.mask is not None):
                parts[number] = apply_to_logits(part)
            reads = reads or part.reads
        penalized = add_some(next((part.users for part in parts if part.penalty is not None), None))
        edits = [(part.edit, add_users(part.users)) for part in parts if part.edit is not None]
        keeps_raw = has_logprobs and bool(edits) and not self._values.is_processed
        may_overwrite = keeps_raw or not has_logprobs

        def hints(own: Sequence[torch.Tensor]) -> RowHints:
            sorts = [(own[number], max_k) for number, max_k in order]
            some = [None if number is None else own[number] for number in (random, penalized)]
            return RowHints(some[0], is_scaled, some[1], sorts, may_overwrite)

        if num_logprobs is not None and capture:
            asked = num_logprobs
            num_logprobs = min(next(width for width in _WIDTHS if width >= asked), self.vocab_size)
        return SamplingWork(
            (num_logprobs, *[part.key for part in parts]) if capture else None,
            any(part.needs_sampling_dtype for part in parts),
            num_logprobs,
            keeps_raw,
            indices,
            None if capture or not parts else hints,
            edits,
            [part.drawn for part in parts if part.drawn is not None],
            self._draw.choose(parts, is_random=is_random),
            self._values,
            self.requested.prepare(rows, add) if has_logprobs else None,
            self.wide.prepare(rows, add) if has_logprobs else None,
        )


def _sampling_rows(plan: StepPlan) -> Ints:
    # without host tokens all rows decode, and all draw
    return plan.rows[plan.num_drawn > 0] if plan.tokens.size else plan.rows
