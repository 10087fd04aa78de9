"""GenerateHead: computes logits from hidden states, draws tokens, stores them in the row table, and proposes drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.config.memory import SCORED_AT_ONCE
from slipstream.contracts.step import StepPlan
from slipstream.nn.decoder import CausalLM
from slipstream.ops.sampling import Accepted, TopLogprobs, earlier_drafts
from slipstream.runner.drafted_plan import DraftedPlan
from slipstream.runner.drafter import DraftBatch, Drafter
from slipstream.runner.features import Gathered, Size
from slipstream.runner.graphs import GraphPool
from slipstream.runner.lora_store import AdapterStore, Tiles
from slipstream.runner.results import (
    DRAFTS,
    KEPT,
    PROMPT,
    WIDE,
    CapturedDraw,
    Head,
    Indices,
    ResultRing,
    ResultShape,
    pack,
    result_shape,
    view_drafts,
    view_draws,
)
from slipstream.runner.rows import RowTable, leave_out_
from slipstream.runner.sampling.logprobs import prepare_scores
from slipstream.runner.sampling.sampler import DrawOutput, Replayed, Sampler
from slipstream.runner.sampling.stage import DrawBatch
from slipstream.runner.staging import Upload


class GenerateHead:
    def __init__(
        self,
        model: CausalLM,
        rows: RowTable,
        sampler: Sampler,
        results: ResultRing,
        logit_dtype: torch.dtype,
        graphs: GraphPool,
        *,
        batch_invariant: bool = False,
        drafter: Drafter | None = None,
        max_length: int = 0,
        adapters: AdapterStore | None = None,
    ) -> None:
        """`batch_invariant`: a row's results have the same bits whatever the rest of the batch is. `max_length`:
        maximum tokens of a row, for the drafter. `adapters`: if requests may have LoRA adapters."""
        self.model = model
        self.rows = rows
        self.sampler = sampler
        self.results = results
        self.graphs = graphs
        self.logit_dtype = logit_dtype
        self.drafter = drafter
        self.max_length = max_length
        self.adapters = adapters
        self._batch_invariant = batch_invariant
        self._picked = PickedInputs(graphs.max_rows)
        self._numpy_dtype = np.float64 if logit_dtype is torch.float64 else np.float32

    def wants_all(self, plan: StepPlan) -> bool:
        return plan.scores is not None or (self.drafter is not None and self.drafter.reads_hidden)

    def prepare(
        self,
        plan: StepPlan,
        upload: Upload,
        size: Size | None = None,
        *,
        only_last: bool = False,
        added: tuple[Hashable, ...] = (),
    ) -> Head | None:
        """Host: upload what sampling needs; None if no row draws in this step and no prompt is scored."""
        num_draws, scores = len(plan.rows), plan.scores
        picked = pick = None
        is_mixed = size is not None and not size.is_single
        if plan.tokens.size or is_mixed or not num_draws:  # otherwise all rows decode and draw
            which = np.flatnonzero(plan.num_drawn)
            num_draws = len(which)
            if not num_draws and scores is None:
                return None
            if num_draws < plan.total_tokens or is_mixed:
                indices = which if only_last else np.cumsum(plan.num_tokens)[which] - 1
                pick = np.stack([indices, which, plan.rows[which]]).astype(np.int64)
        drafts = self._drafts(plan)
        if pick is not None and drafts.offsets is not None:
            pick = np.concatenate([pick, drafts.offsets[None]])
        adapters = self.adapters if self.adapters is not None and self.adapters.changes_head(plan) else None
        if scores is None and adapters is None and (pick is not None or (size is not None and size.is_single)):
            replayed = self._prepare_replayed(plan, num_draws, pick, size, drafts, upload, added)
            if replayed is not None:
                return replayed
        if drafts.run_drafter:
            drafts.max_length = int(plan.lengths.max()) + 1
        if pick is not None:
            picked = upload.put(pick)
        sample = self.sampler.prepare(plan, upload) if num_draws else None
        tiles = None
        if adapters is not None and num_draws:
            slots = plan.adapter_slots
            assert slots is not None
            tiles = adapters.tiles(slots[plan.num_drawn > 0], upload)
        score = None if scores is None else prepare_scores(scores, self._score_logits(plan, adapters, upload), upload)
        shape = result_shape(
            num_draws,
            plan.num_logprobs if num_draws else None,
            self._numpy_dtype,
            None if sample is None or sample.requested is None else sample.requested.shape,
            None if scores is None else (len(scores.indices), scores.num_logprobs),
            None if sample is None or sample.wide is None else sample.wide.shape,
            drafts.offsets is not None and num_draws > 0,
            drafts.num_returned if num_draws else 0,
        )
        out = self.results.open(shape, first=drafts.first if num_draws else None)
        num_rows = len(plan.rows)
        is_padded = size is not None and size.is_single and picked is None  # every row draws

        def run(batch: Gathered, hidden: torch.Tensor) -> None:
            self._leave_out(batch, None if picked is None else upload.tensor(picked))
            results = _named(PROMPT, score(hidden)) if score is not None else {}
            if sample is not None:
                rows, positions, offsets = batch.rows, batch.view.lengths, batch.offsets
                if is_padded:
                    hidden, rows, positions = hidden[:num_rows], rows[:num_rows], positions[:num_rows]
                    offsets = None if offsets is None else offsets[:num_rows]
                if picked is not None:
                    own, indices, rows, *of_drafts = upload.tensor(picked).unbind(0)
                    hidden = hidden.index_select(0, own)
                    positions = positions.index_select(0, indices)
                    offsets = of_drafts[0] if of_drafts else None
                draws = self._draw_batch(rows, positions, offsets, drafts)
                drawn = sample(self._logits(hidden, tiles), draws, self.rows.accept)
                results |= self._compute_results(drawn, draws, hidden, drafts)
                if drawn.requested is not None:
                    results["requested"] = drawn.requested
                if drawn.wide is not None:
                    results |= _named(WIDE, drawn.wide)
            out.write(results)

        return Head(run, out.handle)

    def _prepare_replayed(
        self,
        plan: StepPlan,
        num_draws: int,
        pick: np.ndarray[Any, Any] | None,
        size: Size | None,
        drafts: _Drafts,
        upload: Upload,
        added: tuple[Hashable, ...],
    ) -> Head | None:
        """Host: the head as a captured graph; None if a feature of this step cannot be captured.

        `pick`: the indices of the hidden states to sample from, the indices of their rows in the step, the rows, and
        with drafts the offsets. They are first copied to fixed addresses. None: all hidden states are sampled from,
        where the forward's graph left them.
        """
        # without indices the head has the rows of the forward, which other engines may have made larger
        num_rows = size.rows if pick is None and size is not None else self.graphs.rows_for(num_draws)
        if num_rows is None or (replayed := self.sampler.prepare_by_row(plan)) is None:
            return None
        # captured work is replayed for rows of any length
        drafts.max_length, drafts.num_rows = self.max_length, self.graphs.rows_for(drafts.num_rows) or num_rows
        has_drafts = drafts.offsets is not None
        shape = result_shape(
            num_rows, replayed.num_logprobs, self._numpy_dtype, has_drafts=has_drafts, num_proposed=drafts.num_returned
        )
        out = self.results.open(shape, num_draws, drafts.first)
        span = None
        if pick is not None:
            padded = np.zeros((len(pick), num_rows), np.int64)
            padded[2, num_draws:] = len(self.rows.computed) - 1  # the padding row
            padded[:, :num_draws] = pick
            span = upload.put(padded)
        key: tuple[Hashable, ...] = ("head", num_rows, span is not None, replayed.key)
        if has_drafts or drafts.run_drafter:
            key += (has_drafts, drafts.num_proposed)
        if drafts.num_returned:
            key += ("returned",)
        if drafts.run_drafter and self.drafter is not None and self.drafter.always_runs:
            key += (drafts.num_rows,)
        # without indices the hidden states are where the graph of the forward left them: which graph was it?
        if span is None:
            key += added
        if span is None and size is not None and size.is_short:
            key += ("short",)

        def draw(inputs: DrawInputs) -> torch.Tensor:
            return self._draw(inputs, replayed, shape, drafts)

        def run(batch: Gathered, hidden: torch.Tensor) -> None:
            self._leave_out(batch, None if span is None else upload.tensor(span))
            inputs = DrawInputs.of(batch, hidden)
            if span is not None:
                inputs = self._picked.bring(hidden, batch.view.lengths, upload.tensor(span))
            out.write_packed(self.graphs.run(key, lambda: draw(inputs)))

        captured = None
        if span is None:
            captured = CapturedDraw(key, lambda batch, hidden: draw(DrawInputs.of(batch, hidden)), out.write_packed)
        return Head(run, out.handle, captured)

    def _leave_out(self, batch: Gathered, pick: torch.Tensor | None) -> None:
        """Device: rows that sit out this step draw for the padding row. `pick`: the uploaded indices of the draws."""
        leave_out_(batch.rows if pick is None else pick[2], batch.sitting, len(self.rows.computed) - 1)

    def _drafts(self, plan: StepPlan) -> _Drafts:
        """Host: the drafts of the sampling rows of a step, without `max_length`."""
        num_proposed = 0 if self.drafter is None else plan.num_proposed
        num_returned = num_proposed if plan.returns_drafts else 0
        follows = self.drafter is not None and self.drafter.always_runs and plan.catch_up is None
        run_drafter = num_proposed > 0 or follows
        if not isinstance(plan, DraftedPlan):
            num_rows = int(np.count_nonzero(plan.num_drawn))
            return _Drafts(None, None, num_proposed, run_drafter, False, 0, num_rows, num_returned)
        first, is_read = plan.first_draws, self.sampler.reads_output(plan)
        return _Drafts(plan.draw_offsets, first, num_proposed, run_drafter, is_read, 0, len(first), num_returned)

    def _draw_batch(
        self, rows: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor | None, drafts: _Drafts
    ) -> DrawBatch:
        """Device: the draws of the step."""
        if drafts.offsets is None:
            return DrawBatch(rows, positions)
        assert offsets is not None, "the offsets of a step with drafts were not uploaded"
        earlier = earlier_drafts(self.rows.next_tokens, rows, offsets) if drafts.are_read else None
        return DrawBatch(rows, positions, offsets, earlier)

    def _compute_results(
        self,
        drawn: DrawOutput,
        draws: DrawBatch,
        hidden: torch.Tensor,
        drafts: _Drafts,
        views: Accepted | None = None,
        returned: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Device: store the drawn tokens and propose drafts after them. Returns the results of the draw, those of
        `Accepted` at `views` if given, and drafts at `returned` if the drafter writes there."""
        failed = drawn.failed
        if draws.offsets is None:  # otherwise the sampler has stored the accepted tokens
            _, failed = self.rows.draw(draws.rows, drawn.tokens, failed, views)
        if self.drafter is not None and drafts.run_drafter:
            batch = DraftBatch(
                draws.rows,
                draws.offsets,
                draws.positions,
                drawn.tokens,
                hidden,
                drafts.max_length,
                len(draws.rows) if draws.offsets is None else drafts.num_rows,
                returned,
            )
            self.drafter.propose(batch, drafts.num_proposed)
        results = {"tokens": drawn.tokens if views is None else views.tokens, "failed": failed}
        if drafts.num_returned:
            assert self.drafter is not None, "drafts are returned, but there is no drafter"
            if returned is not None and self.drafter.fills_returned:
                results[DRAFTS] = returned
            else:
                results[DRAFTS] = self.rows.next_tokens[:, 1 : 1 + drafts.num_returned].index_select(0, draws.rows)
        if drawn.kept is not None:
            results[KEPT] = drawn.kept
        return results if drawn.logprobs is None else results | _named("", drawn.logprobs)

    def _draw(self, inputs: DrawInputs, replayed: Replayed, shape: ResultShape, drafts: _Drafts) -> torch.Tensor:
        """Device: draw a token for every row, padding included, and pack the results."""
        hidden, draws = inputs.hidden, self._draw_batch(inputs.rows, inputs.positions, inputs.offsets, drafts)
        # Kernels convert what they read, so only logits that a stage computes with must have the sampling dtype.
        # Batch-invariant logits always have it: the order of sums depends on the dtype, and must not depend on the
        # parameters of other rows.
        wide = replayed.needs_sampling_dtype or self._batch_invariant
        compute = self._logits if wide else self.model.logits
        buffer = self.graphs.results.room(shape.num_bytes)
        views = view_draws(shape, buffer)
        drawn = replayed.sample(compute(hidden), draws, functools.partial(self.rows.accept, out=views))
        returned = view_drafts(shape, buffer)
        return pack(self._compute_results(drawn, draws, hidden, drafts, views, returned), shape, buffer)

    def _logits(self, hidden: torch.Tensor, tiles: Tiles | None = None) -> torch.Tensor:
        """Device: logits in the dtype that sampling uses. `tiles`: hidden states whose adapter changes the logits."""
        logits = self.model.logits(hidden) if tiles is None else self.model.logits(hidden, tiles())
        return logits.to(self.logit_dtype)

    def _score_logits(
        self, plan: StepPlan, adapters: AdapterStore | None, upload: Upload
    ) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """Host: the logits of scored prompt positions, part by part. `adapters`: if one changes the logits."""
        scores, slots = plan.scores, plan.adapter_slots
        if adapters is None or scores is None or slots is None:
            return lambda hidden, part: self._logits(hidden)
        of_scored = np.repeat(slots, plan.num_tokens)[scores.indices]
        firsts = range(0, len(of_scored), SCORED_AT_ONCE)
        tiles = [adapters.tiles(of_scored[first : first + SCORED_AT_ONCE], upload) for first in firsts]
        return lambda hidden, part: self._logits(hidden, tiles[part])


@dataclass(slots=True)  # created in every step: a frozen one costs twice as much
class _Drafts:
    """The drafts of a step's sampling rows, on the host."""

    offsets: Indices | None  # [sampling] index among the draws of one drafted row; None: no row has drafts
    first: Indices | None  # indices of the first draw of each row among all draws
    num_proposed: int  # drafts to propose for the next step
    run_drafter: bool  # also true if the drafter only stores what later steps read
    are_read: bool  # a stage depends on the drafts before a draw
    max_length: int  # at least the number of tokens of every row after the draw
    num_rows: int  # at least the number of rows, each counted once
    num_returned: int  # proposed drafts of each row that the result has


def _named(prefix: str, of: TopLogprobs) -> dict[str, torch.Tensor]:
    """The tensors by their names in the result buffer."""
    return {f"{prefix}{name}": value for name, value in of._asdict().items()}


# DrawInputs: what a captured draw reads of a step.


class DrawInputs(NamedTuple):
    """The hidden states to sample from, their rows, positions and, with drafts, offsets."""

    hidden: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor | None

    @classmethod
    def of(cls, batch: Gathered, hidden: torch.Tensor) -> DrawInputs:
        """All hidden states of a step."""
        return cls(hidden, batch.rows, batch.view.lengths, batch.offsets)


class PickedInputs:
    """The inputs of draws of some hidden states of a step, at fixed addresses: a captured draw reads them there."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._buffers: tuple[torch.Tensor, ...] | None = None

    def bring(self, hidden: torch.Tensor, positions: torch.Tensor, pick: torch.Tensor) -> DrawInputs:
        """Device: `pick` [3 or 4, n]: indices of hidden states, indices of their rows in the step, the rows, offsets if
        there are drafts."""
        if self._buffers is None:
            ids = torch.zeros(3, self._num_rows, dtype=torch.int64, device=hidden.device)
            self._buffers = hidden.new_zeros(self._num_rows, hidden.shape[1]), *ids.unbind(0)
        tokens, indices, rows, *offsets = pick.unbind(0)
        own_hidden, own_positions, own_rows, own_offsets = (buffer[: len(tokens)] for buffer in self._buffers)
        torch.index_select(hidden, 0, tokens, out=own_hidden)
        torch.index_select(positions, 0, indices, out=own_positions)
        own_rows.copy_(rows)
        return DrawInputs(own_hidden, own_rows, own_positions, own_offsets.copy_(offsets[0]) if offsets else None)
