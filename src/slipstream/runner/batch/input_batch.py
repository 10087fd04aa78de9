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
class Size:
    """What a step is padded to. With as many tokens as rows, each row has one."""

    tokens: int
    rows: int

    @property
    def is_single(self) -> bool:
        return self.tokens == self.rows


@dataclass(frozen=True, slots=True)
class Gathered:
    view: BatchView
    rows: torch.Tensor  # [B] int64


class InputBatch:
    def __init__(self, rows: RowTable, page_tables: PageTables) -> None:
        self.rows = rows
        self.page_tables = page_tables

    def prepare_padded(self, plan: StepPlan, upload: Upload, size: Size) -> Callable[[], Gathered]:
        """Host: stage the counts, padded to `size` by tokens of a row that is nobody's.

        It must be the first to write into the upload: then all steps of one size read the same addresses and have the
        same shapes, and what the closure does can be captured.
        """
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        null_row = len(self.rows.computed) - 1
        by_row = np.zeros((2, size.rows), np.int64)  # rows, counts
        by_row[0, num_rows:] = null_row
        by_row[0, :num_rows] = plan.rows
        by_row[1, :num_rows] = num_tokens
        given = np.full(size.tokens, -1, np.int64)
        by_token = starts = None
        if size.is_single:
            if len(plan.tokens):
                given[:num_rows][plan.num_given > 0] = plan.tokens
        else:
            total = plan.total_tokens
            ends = np.cumsum(num_tokens, dtype=np.int32)
            by_token = np.zeros((2, size.tokens), np.int64)  # their rows, their places in them
            by_token[0, total:] = null_row
            by_token[0, :total] = np.repeat(plan.rows, num_tokens)
            by_token[1, :total] = np.arange(total) - np.repeat(ends - num_tokens, num_tokens)
            given[:total][by_token[1, :total] < np.repeat(plan.num_given, num_tokens)] = plan.tokens
            starts = np.full(size.rows + 1, total, np.int32)
            starts[0] = 0
            starts[1 : num_rows + 1] = ends
        spans = [None if array is None else upload.put(array) for array in (by_row, given, by_token, starts)]
        assert spans[0] is not None and spans[0].start == 0, "a padded batch comes first in the upload"
        table, pages = self.rows, self.page_tables

        def gather() -> Gathered:
            by_row, given, by_token, starts = (None if span is None else upload.tensor(span) for span in spans)
            assert by_row is not None
            inputs = gather_rows(
                table.computed,
                table.last_token,
                pages.tables,
                pages.page_size,
                pages.width,
                by_row[0],
                by_row[1],
                token_rows=None if by_token is None else by_token[0],
                offsets=None if by_token is None else by_token[1],
                given=given,
            )
            view = BatchView(
                ids=inputs.ids,
                positions=inputs.positions,
                lengths=inputs.lengths,
                slots=inputs.slots.unbind(0),
                page_tables=inputs.pages.unbind(0),
                num_tokens=np.ones(size.rows, np.int32),
                max_lengths=np.full(size.rows, pages.width * pages.page_size, np.int32),
                num_single=size.rows if size.is_single else 0,
                query_starts=starts,
            )
            return Gathered(view, by_row[0])

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
