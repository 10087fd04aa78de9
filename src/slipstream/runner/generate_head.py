"""GenerateHead: computes logits from hidden states, draws tokens, stores them in the row table, and proposes drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
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
    ResultRing,
    pack,
    result_shape,
    view_drafts,
    view_draws,
)
from slipstream.runner.rows import RowTable, leave_out_
from slipstream.runner.sampling.logprobs import prepare_scores
from slipstream.runner.sampling.sampler import Sampler, SamplingWork
from slipstream.runner.sampling.stage import DrawBatch
from slipstream.runner.staging import Upload


class HeadKey(NamedTuple):
    """All that the captured draws of steps depend on."""

    kind: str
    num_rows: int  # with padding
    is_picked: bool  # the hidden states are at fixed addresses
    sampling: Hashable  # of `SamplingWork`
    drafts: Hashable  # whether a row has drafts, number of proposed and returned ones, rows of a drafter's model
    hidden: Hashable | None = None  # of the graph of the forward, which left the hidden states that are not picked


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
        self, plan: StepPlan, upload: Upload, size: Size | None = None, *, only_last: bool = False
    ) -> Head | None:
        """Host: upload what sampling needs; None if no row draws in this step and no prompt is scored.

        The draws are captured if all that rows use can be: then they are padded too, and read fixed addresses.
        """
        num_draws, pick = self._pick(plan, size, only_last=only_last)
        scores = plan.scores
        if not num_draws and scores is None:
            return None
        adapters = self.adapters if self.adapters is not None and self.adapters.changes_head(plan) else None
        num_rows = None
        if scores is None and adapters is None:
            num_rows = self.graphs.rows_for(num_draws) if pick is not None else None if size is None else size.rows
        sample = self.sampler.prepare(plan, capture=num_rows is not None) if num_draws else None
        is_captured = sample is not None and sample.key is not None
        if num_rows is None or not is_captured:
            num_rows = num_draws
        drafts = self._drafts(plan, num_rows, is_captured=is_captured)
        shape = result_shape(
            num_rows,
            None if sample is None else sample.num_logprobs,
            self._numpy_dtype,
            None if sample is None or sample.requested is None else sample.requested.shape,
            None if scores is None else (len(scores.indices), scores.num_logprobs),
            None if sample is None or sample.wide is None else sample.wide.shape,
            drafts.has_any and num_draws > 0,
            drafts.num_returned if num_draws else 0,
        )
        first = plan.first_draws if isinstance(plan, DraftedPlan) and num_draws else None
        out = self.results.open(shape, num_draws if is_captured else None, first)
        span = None if pick is None or not num_draws else upload.put(self._padded(pick, num_rows))
        score = None if scores is None else prepare_scores(scores, self._score_logits(plan, adapters, upload), upload)
        tiles = None
        if adapters is not None and num_draws:
            slots = plan.adapter_slots
            assert slots is not None
            tiles = adapters.tiles(slots[plan.num_drawn > 0], upload)
        key = None
        if sample is not None and sample.key is not None:
            key = HeadKey("head", num_rows, pick is not None, sample.key, drafts.key)

        index_spans = () if sample is None else [upload.put(each) for each in sample.indices]

        def draw(inputs: DrawInputs, buffer: torch.Tensor, results: dict[str, torch.Tensor]) -> torch.Tensor:
            if sample is not None:
                indices = [upload.tensor(each) for each in index_spans]
                views, returned = view_draws(shape, buffer), view_drafts(shape, buffer)
                results |= self._draw(inputs, sample, indices, drafts, tiles, views, returned)
            return pack(results, shape, buffer)

        def captured(batch: Gathered, hidden: torch.Tensor) -> torch.Tensor:
            return draw(DrawInputs.of(batch, hidden), self.graphs.results.room(shape.num_bytes), {})

        def run(batch: Gathered, hidden: torch.Tensor) -> None:
            picked = None if span is None else upload.tensor(span)
            # rows that sit out this step draw for the padding row
            leave_out_(batch.rows if picked is None else picked[2], batch.sitting, len(self.rows.computed) - 1)
            inputs = DrawInputs.of(batch, hidden) if picked is None else self._picked.bring(batch, hidden, picked)
            if key is None:
                scored = {} if score is None else _named(PROMPT, score(hidden))
                draw(inputs.of_first(num_rows), out.room(), scored)
                return
            # without indices the draws read what the graph of the forward left
            own = key if picked is not None else key._replace(hidden=batch.graph)
            room = self.graphs.results.room(shape.num_bytes)
            out.write_packed(self.graphs.run(own, lambda: draw(inputs, room, {})))

        whole = None if key is None or pick is not None else CapturedDraw(key, captured, out.write_packed)
        return Head(run, out.handle, whole)

    def _pick(
        self, plan: StepPlan, size: Size | None, *, only_last: bool
    ) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]] | None]:
        """Host: the number of draws, and [3 or 4, draws]: indices of the hidden states to sample from, indices of their
        rows in the step, the rows, and with drafts the offsets; None: all hidden states are sampled from."""
        is_mixed = size is not None and not size.is_single
        if not plan.tokens.size and not is_mixed and len(plan.rows):
            return len(plan.rows), None  # all rows decode and draw
        which = np.flatnonzero(plan.num_drawn)
        if len(which) == plan.total_tokens and not is_mixed:
            return len(which), None
        indices = which if only_last else np.cumsum(plan.num_tokens)[which] - 1
        of_drafts = (plan.draw_offsets,) if isinstance(plan, DraftedPlan) else ()
        return len(which), np.stack([indices, which, plan.rows[which], *of_drafts]).astype(np.int64)

    def _padded(self, pick: np.ndarray[Any, Any], num_rows: int) -> np.ndarray[Any, Any]:
        num_draws = pick.shape[1]
        if num_draws == num_rows:
            return pick
        padded = np.zeros((len(pick), num_rows), np.int64)
        padded[2, num_draws:] = len(self.rows.computed) - 1  # the padding row
        padded[:, :num_draws] = pick
        return padded

    def _drafts(self, plan: StepPlan, num_draws: int, *, is_captured: bool) -> _Drafts:
        """Host: the drafts of the sampling rows of a step. `num_draws`: with padding."""
        drafter, first = self.drafter, plan.first_draws if isinstance(plan, DraftedPlan) else None
        num_proposed = 0 if drafter is None else plan.num_proposed
        num_rows, max_length = 0 if drafter is None or not drafter.always_runs else num_draws, self.max_length
        if num_rows and first is not None:
            num_rows = self.graphs.rows_for(len(first)) or num_draws if is_captured else len(first)
        if drafter is not None and not is_captured:  # captured work is replayed for rows of any length
            max_length = int(plan.lengths.max()) + 1
        return _Drafts(
            are_read=first is not None and self.sampler.reads_output(plan),
            has_any=first is not None,
            num_proposed=num_proposed,
            num_returned=num_proposed if plan.returns_drafts else 0,
            runs_drafter=num_proposed > 0 or (drafter is not None and drafter.always_runs and plan.catch_up is None),
            max_length=max_length,
            num_rows=num_rows,
        )

    def _draw(
        self,
        inputs: DrawInputs,
        sample: SamplingWork,
        indices: Sequence[torch.Tensor],
        drafts: _Drafts,
        tiles: Tiles | None,
        views: Accepted,
        returned: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Device: draw a token for every row, padding included, store them, and propose drafts after them. Returns the
        results: those of `Accepted` at `views`, and drafts at `returned` if the drafter writes there."""
        hidden, rows, positions, offsets = inputs
        draws = DrawBatch(rows, positions)
        if drafts.has_any:
            assert offsets is not None, "the offsets of a step with drafts were not uploaded"
            earlier = earlier_drafts(self.rows.next_tokens, rows, offsets) if drafts.are_read else None
            draws = DrawBatch(rows, positions, offsets, earlier)
        # Captured kernels convert what they read, so only logits that a stage computes with must have the sampling
        # dtype. Batch-invariant logits always have it: the order of sums depends on the dtype, and must not depend on
        # the parameters of other rows.
        is_wide = sample.key is None or sample.needs_sampling_dtype or self._batch_invariant
        logits = self._logits(hidden, tiles) if is_wide else self.model.logits(hidden)
        drawn = sample(logits, draws, indices, functools.partial(self.rows.accept, out=views))
        failed = drawn.failed
        if not drafts.has_any:  # otherwise the sampler has stored the accepted tokens
            _, failed = self.rows.draw(rows, drawn.tokens, failed, views)
        if self.drafter is not None and drafts.runs_drafter:
            batch = DraftBatch(
                rows, draws.offsets, positions, drawn.tokens, hidden, drafts.max_length, drafts.num_rows, returned
            )
            self.drafter.propose(batch, drafts.num_proposed)
        results = {"tokens": views.tokens, "failed": failed}
        if drafts.num_returned:
            assert self.drafter is not None, "drafts are returned, but there is no drafter"
            if returned is None or not self.drafter.fills_returned:
                returned = self.rows.next_tokens[:, 1 : 1 + drafts.num_returned].index_select(0, rows)
            results[DRAFTS] = returned
        if drawn.kept is not None:
            results[KEPT] = drawn.kept
        if drawn.logprobs is not None:
            results |= _named("", drawn.logprobs)
        if drawn.requested is not None:
            results["requested"] = drawn.requested
        return results if drawn.wide is None else results | _named(WIDE, drawn.wide)

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

    has_any: bool  # a row has drafts
    are_read: bool  # a stage depends on the drafts before a draw
    num_proposed: int  # drafts to propose for the next step
    num_returned: int  # proposed drafts of each row that the result has
    runs_drafter: bool  # also true if the drafter only stores what later steps read
    max_length: int  # at least the number of tokens of every row after the draw
    num_rows: int  # at least the number of rows, each counted once; for a drafter that computes a model

    @property
    def key(self) -> Hashable:
        """Of captured work."""
        return self.has_any, self.num_proposed, self.num_returned, self.runs_drafter and self.num_rows


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

    def of_first(self, num: int) -> DrawInputs:
        """Without padding."""
        if len(self.rows) == num:
            return self
        return DrawInputs(*[None if each is None else each[:num] for each in self])


class PickedInputs:
    """The inputs of draws of some hidden states of a step, at fixed addresses: a captured draw reads them there."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._buffers: tuple[torch.Tensor, ...] | None = None

    def bring(self, batch: Gathered, hidden: torch.Tensor, pick: torch.Tensor) -> DrawInputs:
        """Device: `pick` [3 or 4, n]: indices of hidden states, indices of their rows in the step, the rows, offsets if
        there are drafts."""
        if self._buffers is None:
            ids = torch.zeros(3, self._num_rows, dtype=torch.int64, device=hidden.device)
            self._buffers = hidden.new_zeros(self._num_rows, hidden.shape[1]), *ids.unbind(0)
        tokens, indices, rows, *offsets = pick.unbind(0)
        own_hidden, own_positions, own_rows, own_offsets = (buffer[: len(tokens)] for buffer in self._buffers)
        torch.index_select(hidden, 0, tokens, out=own_hidden)
        torch.index_select(batch.view.lengths, 0, indices, out=own_positions)
        own_rows.copy_(rows)
        return DrawInputs(own_hidden, own_rows, own_positions, own_offsets.copy_(offsets[0]) if offsets else None)
