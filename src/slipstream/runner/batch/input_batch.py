"""InputBatch: gathers the planned rows into this step's tensors.

The host half of the work is counting, in numpy; the device half reads row and page tables. Between the two a token
that was drawn a step ago, and that the host has not seen, becomes an input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.nn.context import BatchView
from slipstream.ops.rows import gather_rows
from slipstream.runner.batch.page_tables import PageTables
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import Upload
from slipstream.step import StepPlan


@dataclass(frozen=True, slots=True)
class Gathered:
    view: BatchView
    rows: torch.Tensor  # [B] int64


class InputBatch:
    def __init__(self, rows: RowTable, page_tables: PageTables) -> None:
        self.rows = rows
        self.page_tables = page_tables

    def prepare_padded(self, plan: StepPlan, upload: Upload, size: int) -> Callable[[], Gathered]:
        """Host: stage rows of one token each, padded to `size` by a row that is nobody's.

        It must be the first to write into the upload: then all steps of one size read the same addresses and have the
        same shapes, and what the closure does can be captured.
        """
        num_rows = len(plan.rows)
        staged = np.zeros((3, size), np.int64)
        staged[0, num_rows:] = len(self.rows.computed) - 1  # rows
        staged[0, :num_rows] = plan.rows
        staged[1, :num_rows] = 1  # counts
        staged[2] = -1  # given
        if len(plan.tokens):
            staged[2, :num_rows][plan.num_given > 0] = plan.tokens
        span = upload.put(staged)
        assert span.start == 0, "a padded batch comes first in the upload"
        table, pages = self.rows, self.page_tables

        def gather() -> Gathered:
            rows, counts, given = upload.tensor(span).unbind(0)
            inputs = gather_rows(
                table.computed, table.last_token, pages.tables, pages.page_size, pages.width, rows, counts, given=given
            )
            view = BatchView(
                ids=inputs.ids,
                positions=inputs.positions,
                lengths=inputs.lengths,
                slots=inputs.slots.unbind(0),
                page_tables=inputs.pages.unbind(0),
                num_tokens=np.ones(size, np.int32),
                max_lengths=np.full(size, pages.width * pages.page_size, np.int32),
                num_single=size,
            )
            return Gathered(view, rows)

        return gather

    def prepare(self, plan: StepPlan, upload: Upload) -> Callable[[], Gathered]:
        """Host: stage the counts; the closure gathers on the device."""
        num_tokens = plan.num_tokens
        num_given = len(plan.tokens)
        total = plan.total_tokens if num_given else len(plan.rows)  # without given tokens all rows decode
        all_single = total == len(plan.rows)
        rows = upload.put(plan.rows.astype(np.int64))
        token_rows, offsets, counts, query_starts = None, None, None, None
        if not all_single:
            counts = upload.put(num_tokens.astype(np.int64))
            ends = np.cumsum(num_tokens, dtype=np.int32)
            starts = ends - num_tokens
            query_starts = upload.put(np.concatenate([starts[:1], ends]))
            offset_of = np.arange(total) - np.repeat(starts, num_tokens)
            token_rows = upload.put(np.repeat(plan.rows, num_tokens).astype(np.int64))
            offsets = upload.put(offset_of)
        given = None
        if num_given:
            ids = np.full(total, -1, np.int64)
            if num_given == total:
                ids[:] = plan.tokens
            elif all_single:
                ids[plan.num_given > 0] = plan.tokens
            else:
                ids[offset_of < np.repeat(plan.num_given, num_tokens)] = plan.tokens
            given = upload.put(ids)
        num_single = int((num_tokens == 1).argmin()) if not all_single else len(plan.rows)
        longest = int(plan.lengths[plan.lengths.argmax()])  # a third of what max() costs
        table, pages = self.rows, self.page_tables

        def gather() -> Gathered:
            row_index = upload.tensor(rows)
            inputs = gather_rows(
                table.computed,
                table.last_token,
                pages.tables,
                pages.page_size,
                pages.width_of(longest),
                row_index,
                *(None if span is None else upload.tensor(span) for span in (counts, token_rows, offsets, given)),
            )
            view = BatchView(
                ids=inputs.ids,
                positions=inputs.positions,
                lengths=inputs.lengths,
                slots=inputs.slots.unbind(0),
                page_tables=inputs.pages.unbind(0),
                num_tokens=num_tokens,
                max_lengths=plan.lengths,
                num_single=num_single,
                query_starts=None if query_starts is None else upload.tensor(query_starts),
            )
            return Gathered(view, row_index)

        return gather
