"""HeadDrafter: proposes tokens with a `DraftHead`, which reads the target's hidden states (MTP, EAGLE-3).

The entry of a position needs the token after it. For prompt chunks the plan has that token (`StepPlan.following`); for
positions that tokens were drawn from it is the drawn token, so the head of the step computes these. After a rejected
draft the later entries are wrong; the next steps overwrite them with the positions that they compute. Where nothing is
drafted, in prompt chunks and while the number of drafts is 0, only the entries are computed: the projections to keys
and values, not attention and feed-forward.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.step import StepPlan
from slipstream.nn.context import ForwardContext
from slipstream.nn.models.draft_head import DraftHead
from slipstream.runner.batch.input_batch import Size
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import Upload
from slipstream.runner.drafts.draft_cache import DraftCache
from slipstream.runner.drafts.drafter import DraftBatch, Follow
from slipstream.runner.drafts.model_drafter import drawn_rows, first_draws, needs_follow


class HeadDrafter:
    always_runs = True
    reads_hidden = True
    fills_returned = False

    def __init__(self, model: DraftHead, rows: RowTable, cache: DraftCache) -> None:
        self.model = model
        self._rows = rows
        self._cache = cache

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None) -> Follow | None:
        """Host: the drafter's part of a step's forward; None if every token of the step is drawn from."""
        if not needs_follow(plan):
            return None
        num_rows = len(plan.rows)
        following = np.zeros(num_rows if size is None else size.rows, np.int64)
        if len(plan.following):
            following[:num_rows] = plan.following
            following[num_rows:] = plan.following[-1]  # padding rows end at the last token of the last row
        span = upload.put(following)

        def follow(context: ForwardContext, hidden: torch.Tensor) -> None:
            ids = upload.tensor(span)
            starts = context.batch.query_starts
            if starts is not None:
                ids = context.batch.ids.roll(-1).index_copy_(0, starts[1:].long() - 1, ids)
            self.model.store(ids, self.model.features(hidden), self._cache.to_write(context))

        return follow

    def prepare_catch_up(self, plan: StepPlan, upload: Upload) -> None:
        """Host: nothing; this drafter follows every step."""

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        cache, table = self._cache, self._rows
        max_length = min(batch.max_length + num_drafts, cache.max_length)
        draws = drawn_rows(batch, table, cache, max_length)
        features = self.model.features(batch.hidden)
        context = cache.of_rows(batch.tokens, draws, attends=num_drafts > 0)
        if not num_drafts:
            self.model.store(batch.tokens, features, context)
            return
        hidden, features = self.model(batch.tokens, features, context)
        rows, first = batch.rows, first_draws(batch)
        if first is not None:
            rows = rows.index_select(0, first)
        computed = table.computed.index_select(0, rows)
        if first is not None:
            # the last accepted draw of each row: the token drawn there is the one after its computed positions
            last = first + computed - batch.positions.index_select(0, first)
            last = torch.where(rows == len(table.computed) - 1, first, last).clamp_(0, len(batch.rows) - 1)
            hidden, features = hidden.index_select(0, last), features.index_select(0, last)
        drafted = cache.drafted_rows(rows, computed, max_length)
        for number in range(1, num_drafts + 1):
            drafts = self.model.draft(hidden)
            table.next_tokens[:, number].index_copy_(0, rows, drafts)
            if number < num_drafts:
                context = cache.of_rows(drafts, drafted.at(computed + number - 1))
                hidden, features = self.model(drafts, features, context)
