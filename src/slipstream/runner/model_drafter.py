"""ModelDrafter: proposes the tokens that a second, smaller model gives the highest logits.

The head of a step that proposes drafts runs the drafter over the positions that tokens were drawn from; then each
further draft takes one pass over one token per row. Positions, pages and tokens are read from device tables, so nothing
waits and the passes can be captured with the rest of the head. Positions of other steps and of prompts are computed
before, in one prefill pass that the plan asks for. If the plan cannot ask for it, the drafter follows every step: after
the target it computes all tokens of a step with prompt chunks, and the head computes the positions that tokens were
drawn from, also if no drafts are needed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slipstream.base.errors import ModelError
from slipstream.config.config import EngineConfig
from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.nn.context import ForwardContext
from slipstream.nn.decoder import CausalLM, Decoder
from slipstream.nn.drafters.dflash import DFlashModel
from slipstream.nn.drafters.draft_head import AttachedModel, DraftHead
from slipstream.nn.drafters.draft_layout import open_draft
from slipstream.nn.sdpa import choose_attention
from slipstream.runner.drafter import DraftBatch, DraftCache, DraftRows, own_groups
from slipstream.runner.features import ForwardPart, Size, StepFeature
from slipstream.runner.rows import PageTables, RowTable, TokenHistory
from slipstream.runner.staging import Upload
from slipstream.runner.stores import KVStore, ScratchPages

_KEY = "drafter"  # of captured forwards with a drafter


class ModelDrafter(StepFeature):
    always_runs = True
    reads_hidden = False
    fills_returned = False

    def __init__(self, model: CausalLM, rows: RowTable, cache: DraftCache, history: TokenHistory) -> None:
        self.model = model
        self._rows = rows
        self._cache = cache
        self._history = history

    def join_forward(self, plan: StepPlan, upload: Upload, size: Size | None) -> ForwardPart | None:
        """Host: the drafter's pass over the tokens of the step; if plans let it catch up, that over positions of
        earlier steps and of prompts instead. None if it has nothing to compute."""
        if plan.catch_up is None:
            return ForwardPart(_KEY, follow=self._follow) if needs_follow(plan) else None
        return ForwardPart(after=self._catch_up(plan.catch_up, upload)) if len(plan.catch_up) else None

    def _catch_up(self, planned: Ints, upload: Upload) -> Callable[[], None]:
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
    # a dry run has positions of 0 (ops/platform/compile_ahead.py)
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


# HeadDrafter: proposes tokens with a `DraftHead`, which reads the target's hidden states (MTP, EAGLE-3).
#
# The entry of a position needs the token after it. For prompt chunks the plan has that token (`StepPlan.following`);
# for positions that tokens were drawn from it is the drawn token, so the head of the step computes these. After a
# rejected draft the later entries are wrong; the next steps overwrite them with the positions that they compute. Where
# nothing is drafted, in prompt chunks and while the number of drafts is 0, only the entries are computed: the
# projections to keys and values, not attention and feed-forward.


class HeadDrafter(StepFeature):
    always_runs = True
    reads_hidden = True
    fills_returned = False

    def __init__(self, model: DraftHead, rows: RowTable, cache: DraftCache) -> None:
        self.model = model
        self._rows = rows
        self._cache = cache

    def join_forward(self, plan: StepPlan, upload: Upload, size: Size | None) -> ForwardPart | None:
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

        return ForwardPart(_KEY, follow=follow)

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


# BlockDrafter: proposes all tokens of a block in one pass of a block drafter (DFlash).
#
# A context entry depends on the target's hidden states of its own position only. So the forward of every step stores
# the entries of all its tokens, also in steps that propose nothing, and a prefix hit includes them. Entries of rejected
# drafts are overwritten by the step that computes their positions again. The keys of a block go to the row's scratch
# pages, or behind its last computed position, where later context entries overwrite them.


class BlockDrafter(StepFeature):
    always_runs = True
    reads_hidden = True
    fills_returned = False

    def __init__(self, model: DFlashModel, rows: RowTable, cache: DraftCache) -> None:
        self.model = model
        self._rows = rows
        self._cache = cache

    def join_forward(self, plan: StepPlan, upload: Upload, size: Size | None) -> ForwardPart:
        """Host: the drafter's part of every step's forward."""
        return ForwardPart(_KEY, follow=self._follow)

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


# Builds a drafter that runs a model: its weights, its cache and its attention.

Fill = Callable[[bool], None]
"""Reads the weights of a model; takes whether to show progress."""


def open_draft_model(
    config: EngineConfig, target: Decoder, device: Device, fill: Fill
) -> tuple[Decoder | AttachedModel | None, Fill]:
    """The model of the drafter with unfilled weights, None if there is none; and a function that calls `fill` and then
    reads these weights."""
    if config.draft is None:
        return None, fill
    try:
        model, fill_draft = open_draft(config.draft, target, device.torch_device)
    except ModelError as error:
        raise type(error)(f"the draft model of speculative_config: {error}") from error

    def fill_both(progress: bool) -> None:
        fill(progress)
        fill_draft(progress)

    return model, fill_both


def scratch_pages(config: EngineConfig) -> ScratchPages | None:
    drafts = config.scheduler.drafts
    if config.draft is None or drafts is None:
        return None
    num_pages = config.draft.scratch_pages(drafts.num_drafts, config.cache.page_size)
    return ScratchPages(config.draft.first_site, config.scheduler.max_num_seqs + 1, num_pages)


def build_drafter(
    config: EngineConfig,
    model: Decoder | AttachedModel,
    rows: RowTable,
    tables: PageTables,
    store: KVStore,
    history: TokenHistory,
) -> ModelDrafter | HeadDrafter | BlockDrafter:
    assert config.draft is not None
    attention = choose_attention(
        store.device.torch_device,
        tuple(own_groups(store.groups, config.draft.first_site).values()),
        getattr(torch, config.draft.model.dtype),
        (),
        deterministic=config.model.deterministic,
    )
    draft_cache = DraftCache(store, tables, attention, config.scheduler.max_model_len)
    if isinstance(model, DraftHead):
        return HeadDrafter(model, rows, draft_cache)
    if isinstance(model, DFlashModel):
        return BlockDrafter(model, rows, draft_cache)
    assert isinstance(model, Decoder), f"no drafter runs {type(model).__name__}"
    return ModelDrafter(model, rows, draft_cache, history)
