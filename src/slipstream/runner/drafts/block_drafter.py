"""BlockDrafter: proposes all tokens of a block in one pass of a block drafter (DFlash).

A context entry depends on the target's hidden states of its own position only. So the forward of every step stores
the entries of all its tokens, also in steps that propose nothing, and a prefix hit includes them. Entries of rejected
drafts are overwritten by the step that computes their positions again. The keys of a block go to the row's scratch
pages, or behind its last computed position, where later context entries overwrite them.
"""

from __future__ import annotations

import torch

from slipstream.contracts.step import StepPlan
from slipstream.nn.context import ForwardContext
from slipstream.nn.models.dflash import DFlashModel
from slipstream.runner.batch.input_batch import Size
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import Upload
from slipstream.runner.drafts.draft_cache import DraftCache
from slipstream.runner.drafts.drafter import DraftBatch, Follow
from slipstream.runner.drafts.model_drafter import rows_of


class BlockDrafter:
    always_runs = True
    reads_hidden = True
    fills_returned = False

    def __init__(self, model: DFlashModel, rows: RowTable, cache: DraftCache) -> None:
        self.model = model
        self._rows = rows
        self._cache = cache

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None) -> Follow | None:
        """Host: the drafter's part of a step's forward."""
        return self._follow

    def prepare_catch_up(self, plan: StepPlan, upload: Upload) -> None:
        """Host: nothing; this drafter follows every step."""

    def _follow(self, context: ForwardContext, hidden: torch.Tensor) -> None:
        self.model.write_context(hidden, self._cache.to_write(context))

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        if not num_drafts:
            return
        cache, table, model = self._cache, self._rows, self.model
        size = 1 + num_drafts
        rows = rows_of(batch)
        computed = table.computed.index_select(0, rows)
        max_length = min(batch.max_length + num_drafts, cache.max_length)
        tokens = cache.drafted_rows(rows, computed, max_length).repeated(size)
        ids = torch.full((len(rows), size), model.mask_token, device=rows.device)
        ids[:, 0] = table.next_tokens[:, 0].index_select(0, rows)
        ids = ids.view(-1)
        ends = (computed + size).clamp_(max=max_length).repeat_interleave(size, output_size=len(ids))
        causal = cache.of_rows(ids, tokens) if any(model.causal) else None
        hidden = model(cache.of_rows(ids, tokens, ends), causal)
        of_masks = hidden.view(len(rows), size, -1)[:, 1:].reshape(len(rows) * num_drafts, -1)
        drafts = model.draft(of_masks).view(len(rows), num_drafts)
        table.next_tokens[:, 1:size].index_copy_(0, rows, drafts)
