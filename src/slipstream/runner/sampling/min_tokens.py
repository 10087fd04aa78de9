"""MinTokens: forbids tokens that would end the request before it has `min_tokens` output tokens."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sample import forbid_
from slipstream.runner.batch.staging import StagedTensor, Upload
from slipstream.runner.sampling.entry_allocator import StagedEntries
from slipstream.runner.sampling.entry_tables import ListTable
from slipstream.runner.sampling.stage import ByRow, DrawBatch, Stage, StageWork


class MinTokens(Stage):
    """Sets stop ids to -inf while the drawn position is below the row's limit.

    The device compares the position, since only the device knows it once drafts are accepted. The host counts draws and
    stops using the stage for a row after as many draws as tokens were missing: each draw gives at least one token.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device, max_ids: int) -> None:
        self.vocab_size = vocab_size
        self.max_ids = max_ids
        self.entries = StagedEntries(num_rows, device)
        self.missing = np.zeros(num_rows, np.int64)  # draws for which the row still uses the stage
        self.limit = np.zeros(num_rows, np.int64)  # first position at which the request may end
        self.staged_limit = StagedTensor((num_rows,), np.int64, device)  # 0 for rows without min_tokens
        self.ids = ListTable(self.entries, 1, torch.int64, device, max_ids, fill=None)  # stop ids
        self._new: list[tuple[int, list[int]]] = []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.ids.free(row)
            self.missing[row] = 0
            if self.limit[row]:
                self.limit[row] = 0
                self.staged_limit.write(row, 0)
        for admission in plan.admitted:
            limit = admission.num_prompt_tokens + admission.params.min_tokens
            ids = sorted({i for i in admission.stop_ids if 0 <= i < self.vocab_size})
            # if every id of the vocabulary is a stop id, there is nothing else to draw: let the request end
            if limit <= admission.num_known or not ids or len(ids) == self.vocab_size:
                continue
            self.missing[admission.row] = limit - admission.num_known
            self.limit[admission.row] = limit
            self.staged_limit.write(admission.row, limit)
            self.ids.assign(admission.row, len(ids))
            self._new.append((admission.row, ids))

    def flush(self, upload: Upload) -> None:
        if self._new:
            self.ids.make_room(upload)
        self.entries.flush(upload)
        self.staged_limit.flush(upload)
        for row, ids in self._new:
            self._write(int(self.entries.of_row[row]), upload, np.array(ids, np.int32))
        self._new = []

    def _write(self, entry: int, upload: Upload, ids: Ints) -> None:
        table, span, num = self.ids, upload.put(ids), len(ids)

        def write() -> None:
            own, ids = upload.tensor(span), table.tensor[entry]
            ids[:num].copy_(own)
            ids[num:].copy_(own[:1].expand(ids.shape[0] - num))

        upload.then(write)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        if not len(self.entries):
            return None
        index = np.flatnonzero(self.missing[rows] > 0)
        if not len(index):
            return None
        users = rows[index]
        self.missing[users] -= 1
        table = self.ids
        index_span, entry_span = upload.put(index), upload.put(self.entries.of_row[users])
        limit_span = upload.put(self.limit[users])

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            index = upload.tensor(index_span)
            too_early = batch.positions.index_select(0, index) < upload.tensor(limit_span)
            forbid_(logits, index, table.tensor.index_select(0, upload.tensor(entry_span)), too_early)

        return StageWork(edit)

    def is_used_by(self, rows: Ints) -> bool:
        return len(self.entries) > 0 and bool((self.missing[rows] > 0).any())

    def can_capture(self, rows: Ints) -> bool:
        """Only if the ids that `by_row` gathers, an entry of the table for each row, stay within the bound."""
        return self.ids.is_roomy and len(rows) * self.ids.shape[1] <= self.max_ids

    def by_row(self, rows: Ints) -> ByRow:
        self.missing[rows] -= self.missing[rows] > 0
        table, entries, limit = self.ids, self.entries.staged.device, self.staged_limit.device

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            too_early = batch.positions < limit.index_select(0, batch.rows)
            held = entries.index_select(0, batch.rows).clamp_(min=0)
            forbid_(logits, None, table.tensor.index_select(0, held), too_early)

        return ByRow(("min_tokens", table.number), StageWork(edit))
