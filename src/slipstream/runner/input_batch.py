"""InputBatch: gathers the input tensors of a step from the planned rows.

The host counts tokens in numpy; the device reads the row table and the page tables. So a token that the last step drew,
and that the host does not know yet, becomes an input of this step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.nn.context import BatchView, ForwardContext, GivenEmbeddings
from slipstream.ops.elementwise import MAX_ADVANCED_DRAFTS, StepRows, gather_inputs
from slipstream.runner.drafted_plan import DraftedPlan, expand_drafts
from slipstream.runner.features import ForwardPart, Gathered, Size, StepFeature
from slipstream.runner.rows import PageTables, RowTable, TokenHistory
from slipstream.runner.staging import StagedTensor, Upload

Longs = np.ndarray[Any, np.dtype[np.int64]]


SHORT_LENGTH = 1024
"""Tokens of a single row whose steps have graphs of their own. Attention has a program for each split that the longest
row may have; those without keys take the multiprocessors for a moment that the next kernel needs."""


class BatchInputs(Protocol):
    """Builds the device inputs of a plan."""

    keeps_rows: bool  # rows last for several steps, else for one

    def expand(self, plan: StepPlan) -> StepPlan:
        """Host: the plan as all parts of the runner read it."""

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None = None) -> Callable[[], Gathered]:
        """Host: upload the counts, padded to `size` if there is one. The returned work gathers the inputs on the
        device.

        A padded batch must be the first to write to the upload: then all steps of one size read the same addresses and
        have the same shapes, so that the work can be captured.
        """

    def advance(self, batch: Gathered) -> None:
        """Device: record that the positions of this batch are computed."""


class InputBatch:
    keeps_rows = True

    def __init__(self, rows: RowTable, page_tables: PageTables, history: TokenHistory | None = None) -> None:
        """`history`: only if a drafter reads it."""
        self.rows = rows
        self.page_tables = page_tables
        self.history = history
        self._kept: ArrayCache[tuple[Size, _Counts]] = ArrayCache()  # of rows of padded plans without host tokens

    def expand(self, plan: StepPlan) -> StepPlan:
        return expand_drafts(plan) if plan.has_drafts else plan

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None = None) -> Callable[[], Gathered]:
        counts = self._count(plan) if size is None else self._kept_counts(plan, size)
        arrays = (counts.rows, counts.counts, counts.token_rows, counts.offsets, counts.host_ids, counts.starts)
        spans = [None if array is None else upload.put(array) for array in arrays]
        assert spans[0] is not None and (size is None or spans[0].start == 0), "a padded batch comes first"
        table, pages, history = self.rows, self.page_tables, self.history
        is_single = counts.starts is None
        is_drafted = is_single and isinstance(plan, DraftedPlan)
        advance = is_single and (not is_drafted or len(counts.rows) <= MAX_ADVANCED_DRAFTS)

        def gather() -> Gathered:
            rows, *others, starts = [None if span is None else upload.tensor(span) for span in spans]
            assert rows is not None
            step = StepRows(rows, *others)
            kept = None if history is None else history.kept
            state = table.computed, table.next_tokens, pages.tables
            inputs = gather_inputs(*state, pages.page_size, counts.width, step, kept=kept, advance=advance)
            token_rows = rows if step.token_rows is None else step.token_rows
            view = BatchView(
                ids=inputs.ids,
                positions=inputs.positions,
                lengths=inputs.lengths,
                slots=inputs.slots.unbind(0),
                page_tables=inputs.pages.unbind(0),
                num_tokens=counts.num_tokens,
                max_lengths=counts.max_lengths,
                num_single=counts.num_single,
                all_long=size is not None and size.all_long,
                host_ids=step.host_ids,
                max_queries=1 + table.max_drafts if is_drafted else 1,
                query_starts=starts,
            )
            return Gathered(view, rows, step.offsets if is_single else None, token_rows, is_advanced=advance)

        return gather

    def advance(self, batch: Gathered) -> None:
        if not batch.is_advanced:
            self.rows.advance(batch.rows, batch.view.lengths)

    def _count(self, plan: StepPlan) -> _Counts:
        num_tokens, num_rows = plan.num_tokens, len(plan.rows)
        num_host_tokens = len(plan.tokens)
        total = plan.total_tokens if num_host_tokens else num_rows  # without host tokens all rows decode
        longest = int(plan.lengths[plan.lengths.argmax()])  # a third of the time of max()
        counts = _Counts(plan.rows.astype(np.int64), num_tokens, plan.lengths, num_rows)
        counts.width = self.page_tables.width_of(longest)
        offsets, of_drafts = None, _draft_offsets(plan)
        if of_drafts is not None and total == num_rows:
            counts.counts, offsets = of_drafts + 1, of_drafts
            counts.offsets, counts.host_ids = of_drafts, -1 - of_drafts
        if total > num_rows:
            counts.num_single = int((num_tokens == 1).argmin())
            counts.counts = num_tokens.astype(np.int64)
            ends = np.cumsum(num_tokens, dtype=np.int32)
            starts = ends - num_tokens
            counts.starts = np.concatenate([starts[:1], ends])
            offsets = counts.offsets = np.arange(total) - np.repeat(starts, num_tokens)
            counts.token_rows = np.repeat(plan.rows, num_tokens).astype(np.int64)
            if of_drafts is not None:
                counts.counts += of_drafts
                offsets += np.repeat(of_drafts, num_tokens)
        if num_host_tokens:
            counts.host_ids = np.full(total, -1, np.int64)
            if of_drafts is not None:
                counts.host_ids -= np.repeat(of_drafts, num_tokens)
            _fill_host_ids(counts.host_ids, plan, offsets)
        return counts

    def _kept_counts(self, plan: StepPlan, size: Size) -> _Counts:
        """Padded counts. Those of decodes and drafts do not depend on lengths, and plans share the array of their rows
        as long as the same rows have the same numbers of drafts."""
        if len(plan.tokens):
            return self._count_padded(plan, size)
        found = self._kept.get(plan.rows)
        if found is None or found[0] != size:
            found = self._kept.put(plan.rows, (size, self._count_padded(plan, size)))
        return found[1]

    def _count_padded(self, plan: StepPlan, size: Size) -> _Counts:
        """Counts with tokens of the padding row."""
        num_rows, num_tokens, width = len(plan.rows), plan.num_tokens, self.page_tables.width
        if size.is_short:
            width = min(width, self.page_tables.width_of(SHORT_LENGTH))
        null_row = len(self.rows.computed) - 1
        longest = np.full(size.rows, width * self.page_tables.page_size, np.int32)
        rows = np.full(size.rows, null_row, np.int64)
        rows[:num_rows] = plan.rows
        counts = _Counts(rows, np.ones(size.rows, np.int32), longest, size.rows if size.is_single else 0)
        counts.width = width
        counts.counts = np.zeros(size.rows, np.int64)
        counts.counts[:num_rows] = num_tokens
        counts.host_ids = np.full(size.tokens, -1, np.int64)
        offsets, of_drafts = None, _draft_offsets(plan)
        if of_drafts is not None:
            counts.counts[:num_rows] += of_drafts
            counts.host_ids[: plan.total_tokens] -= np.repeat(of_drafts, num_tokens)
        if size.is_single and self.rows.max_drafts:  # the heads of steps without drafts may read them
            counts.offsets = np.zeros(size.tokens, np.int64)
            if of_drafts is not None:
                offsets = counts.offsets[:num_rows]
                offsets[:] = of_drafts
        if not size.is_single:
            total = plan.total_tokens
            ends = np.cumsum(num_tokens, dtype=np.int32)
            counts.token_rows = np.full(size.tokens, null_row, np.int64)
            counts.token_rows[:total] = np.repeat(plan.rows, num_tokens)
            counts.offsets = np.zeros(size.tokens, np.int64)
            offsets = counts.offsets[:total]
            offsets[:] = np.arange(total) - np.repeat(ends - num_tokens, num_tokens)
            if of_drafts is not None:
                offsets += np.repeat(of_drafts, num_tokens)
            counts.starts = np.full(size.rows + 1, total, np.int32)
            counts.starts[0] = 0
            counts.starts[1 : num_rows + 1] = ends
        if len(plan.tokens):
            _fill_host_ids(counts.host_ids, plan, offsets)
        return counts


class _Counts:
    """Host counts of a step. All but the last four are uploaded; None where `gather_inputs` accepts None."""

    def __init__(self, rows: Longs, num_tokens: Ints, max_lengths: Ints, num_single: int) -> None:
        self.rows = rows
        self.counts: Longs | None = None
        self.token_rows: Longs | None = None
        self.offsets: Longs | None = None
        self.host_ids: Longs | None = None
        self.starts: Ints | None = None
        self.num_tokens = num_tokens
        self.max_lengths = max_lengths
        self.num_single = num_single
        self.width = 0


def _draft_offsets(plan: StepPlan) -> Longs | None:
    """[planned] index of each row among those of its drafted row; None: the step has no drafts."""
    return plan.offsets.astype(np.int64) if isinstance(plan, DraftedPlan) else None


def _fill_host_ids(host_ids: Longs, plan: StepPlan, offsets: Longs | None) -> None:
    """Write the host's token ids to their positions. `offsets`: of tokens in their rows; None: one token per row."""
    num_host_tokens, num_rows = len(plan.tokens), len(plan.rows)
    if offsets is None:
        host_ids[:num_rows][plan.num_host_tokens > 0] = plan.tokens
    elif num_host_tokens == len(offsets):
        host_ids[:num_host_tokens] = plan.tokens
    else:
        host_ids[: len(offsets)][offsets < np.repeat(plan.num_host_tokens, plan.num_tokens)] = plan.tokens


# EmbedUploads: uploads the embeddings that requests bring for tokens of their prompts.
#
# They are part of the step's one upload: `config/buffer_size.py` sizes the buffers for a step whose tokens are all
# embedded. Such a step runs eagerly, since the number of embedded tokens differs between steps.


class EmbedUploads(StepFeature):
    def captures(self, plan: StepPlan) -> bool:
        return plan.embeds is None

    def join_forward(self, plan: StepPlan, upload: Upload, size: Size | None) -> ForwardPart | None:
        if plan.embeds is None:
            return None
        indices = upload.put(plan.embeds.indices.astype(np.int64))
        first = plan.embeds.values[0]
        values, target = upload.room(first.dtype, (len(plan.embeds.indices), first.shape[1]))
        np.concatenate(plan.embeds.values, out=target)

        def add(batch: Gathered, context: ForwardContext) -> ForwardContext:
            given = GivenEmbeddings(upload.tensor(indices), upload.tensor(values))
            return replace(context, batch=replace(context.batch, embeds=given))

        return ForwardPart(add=add)


# RopeRows: the rows of the rope table that the tokens of a step read, for models with LongRoPE.
#
# The table has the long factors first, then the short ones (`nn/layers/rope.py`). A request uses one kind while it
# holds its row, so the device stores one offset per row.


class RopeRows(StepFeature):
    def __init__(self, num_rows: int, first_short: int, device: Device) -> None:
        """`first_short`: the row of the rope table with position 0 of the short factors."""
        self._first_short = first_short
        self._offsets = StagedTensor((num_rows,), np.int64, device)

    def apply(self, plan: StepPlan) -> None:
        for admission in plan.all_admitted:
            self._offsets.write(admission.row, 0 if admission.long_rope else self._first_short)

    def flush(self, upload: Upload) -> None:
        self._offsets.flush(upload)

    def join_forward(self, plan: StepPlan, upload: Upload, size: Size | None) -> ForwardPart:
        return ForwardPart(add=self._add)

    def _add(self, batch: Gathered, context: ForwardContext) -> ForwardContext:
        view = context.batch
        assert batch.token_rows is not None, "rows with rope factors of their own last for several steps"
        rope_rows = self._offsets.device.index_select(0, batch.token_rows) + view.positions
        return replace(context, batch=replace(view, rope_rows=rope_rows))


# ArrayCache: remembers what was found for an array, by the array's identity.
#
# Plans share the arrays of their rows as long as the same rows compute. Steps with and without drafts take turns, so
# that a few arrays are in use at a time.

T = TypeVar("T")
_MOST = 8  # arrays


class ArrayCache(Generic[T]):
    def __init__(self) -> None:
        # by id: the array, which keeps its id from another one, and what was found
        self._found: dict[int, tuple[np.ndarray[Any, Any], T]] = {}

    def get(self, array: np.ndarray[Any, Any]) -> T | None:
        entry = self._found.get(id(array))
        return None if entry is None else entry[1]

    def put(self, array: np.ndarray[Any, Any], value: T) -> T:
        if len(self._found) >= _MOST:
            self._found.clear()
        self._found[id(array)] = array, value
        return value

    def clear(self) -> None:
        self._found.clear()
