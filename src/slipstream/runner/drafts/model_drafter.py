"""ModelDrafter: proposes the tokens that a second, smaller model gives the highest logits.

The head of a step that proposes drafts runs the drafter over the positions that tokens were drawn from; then each
further draft takes one pass over one token per row. Positions, pages and tokens are read from device tables, so nothing
waits and the passes can be captured with the rest of the head. Positions of other steps and of prompts are computed
before, in one prefill pass that the plan asks for (`prepare_catch_up`). If the plan cannot ask for it, the drafter
follows every step: after the target it computes all tokens of a step with prompt chunks (`prepare`), and the head
computes the positions that tokens were drawn from, also if no drafts are needed.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.step import StepPlan
from slipstream.nn.context import ForwardContext
from slipstream.nn.models.base import CausalLM
from slipstream.runner.batch.input_batch import Size
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import Upload
from slipstream.runner.batch.token_history import TokenHistory
from slipstream.runner.drafts.draft_cache import DraftCache, DraftRows
from slipstream.runner.drafts.drafter import CatchUp, DraftBatch, Follow


class ModelDrafter:
    always_runs = True
    reads_hidden = False
    fills_returned = False

    def __init__(self, model: CausalLM, rows: RowTable, cache: DraftCache, history: TokenHistory) -> None:
        self.model = model
        self._rows = rows
        self._cache = cache
        self._history = history

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None) -> Follow | None:
        """Host: the drafter's part of a step's forward; None if every token of the step is drawn from, or if plans let
        the drafter catch up."""
        return self._follow if plan.catch_up is None and needs_follow(plan) else None

    def prepare_catch_up(self, plan: StepPlan, upload: Upload) -> CatchUp | None:
        """Host: the drafter's pass over positions of earlier steps and of prompts; None if there are none."""
        planned = plan.catch_up
        if planned is None or not len(planned):
            return None
        # rows of one token come first in a batch
        planned = planned[np.argsort(planned[:, 2] > 1, kind="stable")].astype(np.int64)
        counts = planned[:, 2]
        rows = upload.put(np.ascontiguousarray(planned[:, 0]))
        spans = upload.put(np.ascontiguousarray(planned[:, 1:]))
        total, max_length = int(counts.sum()), int((planned[:, 1] + counts).max())

        def catch_up() -> None:
            starts, numbers = upload.tensor(spans).unbind(1)
            chunks = self._cache.chunks(upload.tensor(rows), starts, numbers, total, max_length)
            ids = self._history.at(chunks.token_rows, chunks.positions, self._cache.tables)
            self.model(self._cache.of_chunks(ids, chunks, counts.astype(np.int32)))

        return catch_up

    def _follow(self, context: ForwardContext, hidden: torch.Tensor) -> None:
        self.model(self._cache.of_step(context))

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        cache, table = self._cache, self._rows
        max_length = min(batch.max_length + num_drafts, cache.max_length)
        draws = drawn_rows(batch, table, cache, max_length)
        ids = self._history.at(draws.rows, draws.positions, cache.tables)
        if not num_drafts:
            self.model(cache.of_rows(ids, draws))
            return
        rows = rows_of(batch)
        computed = table.computed.index_select(0, rows)
        drafted = cache.drafted_rows(rows, computed, max_length)
        drafts = table.next_tokens[:, 0].index_select(0, rows)
        # the first pass also computes the positions that the target has computed in this step
        context = cache.of_rows(torch.cat([ids, drafts]), draws.and_then(drafted))
        hidden = self.model(context)[len(ids) :]
        for number in range(1, num_drafts + 1):
            drafts = self.model.logits(hidden).argmax(1)
            table.next_tokens[:, number].index_copy_(0, rows, drafts)
            if number < num_drafts:
                hidden = self.model(cache.of_rows(drafts, drafted.at(computed + number)))


def needs_follow(plan: StepPlan) -> bool:
    """Host: whether the step has tokens that nothing is drawn from: the head does not compute them."""
    return len(plan.tokens) > 0 and plan.total_tokens > int(plan.num_drawn.sum())


def drawn_rows(batch: DraftBatch, table: RowTable, cache: DraftCache, max_length: int) -> DraftRows:
    """Device: the rows of the draws, at the positions that they are drawn from."""
    padding = len(table.computed) - 1
    # a dry run has positions of 0 (ops/compile_ahead.py)
    positions = torch.where(batch.rows == padding, 0, batch.positions - 1).clamp_(min=0)
    return cache.computed_rows(batch.rows, positions, max_length)


def first_draws(batch: DraftBatch) -> torch.Tensor | None:
    """Device: the index of the first draw of each row [num_rows]; None: every draw is one. If there are fewer rows,
    the rest repeats the first of them."""
    if batch.offsets is None:
        return None
    is_first = batch.offsets == 0
    number = (is_first.cumsum(0) - 1).clamp_(max=batch.num_rows)
    target = torch.where(is_first, number, batch.num_rows)
    found = torch.zeros(batch.num_rows + 1, dtype=torch.int64, device=target.device)
    found.scatter_(0, target, torch.arange(len(target), device=target.device))
    return found[: batch.num_rows]


def rows_of(batch: DraftBatch) -> torch.Tensor:
    """Device: the rows of the batch, each once [num_rows]."""
    first = first_draws(batch)
    return batch.rows if first is None else batch.rows.index_select(0, first)
