"""LogitBias: allowed ids and logit bias, as one value to add to the logit of each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sample import add_entries_
from slipstream.params.sampling import SamplingParams
from slipstream.runner.batch.staging import Upload
from slipstream.runner.sampling.entry_allocator import StagedEntries
from slipstream.runner.sampling.entry_tables import EntryTable
from slipstream.runner.sampling.stage import ByRow, DrawBatch, Stage, StageWork


class LogitBias(Stage):
    """A row that uses it has an entry of the table: -inf for tokens that are not allowed, else the bias or 0."""

    def __init__(
        self, num_rows: int, vocab_size: int, device: Device, dtype: np.dtype[Any], torch_dtype: torch.dtype
    ) -> None:
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.entries = StagedEntries(num_rows, device)
        self.table = EntryTable(num_rows, vocab_size, torch_dtype, device)
        self._new: list[tuple[int, SamplingParams]] = []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.entries.free(row)
        for admission in plan.admitted:
            params = admission.params
            if params.allowed_token_ids is not None or params.logit_bias is not None:
                self._new.append((self.entries.assign(admission.row), params))

    def flush(self, upload: Upload) -> None:
        self.entries.flush(upload)
        if self._new:
            self.table.reserve(1 + max(entry for entry, _ in self._new), upload)
        for entry, params in self._new:
            self._write(entry, params, upload)
        self._new = []

    def _write(self, entry: int, params: SamplingParams, upload: Upload) -> None:
        table = self.table
        allowed = bias = values = None
        if params.allowed_token_ids is not None:
            allowed = upload.put(np.array(params.allowed_token_ids, np.int32))
        if params.logit_bias is not None:
            bias = upload.put(np.array(list(params.logit_bias), np.int32))
            values = upload.put(np.array(list(params.logit_bias.values()), self.dtype))

        def write() -> None:
            own = table.tensor[entry]
            own.fill_(0 if allowed is None else -torch.inf)
            if allowed is not None:
                own.index_fill_(0, upload.tensor(allowed).long(), 0)
            if bias is not None and values is not None:
                own.index_add_(0, upload.tensor(bias).long(), upload.tensor(values))

        upload.then(write)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        users = self.entries.users(rows, upload)
        if users is None:
            return None
        table = self.table

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            logits.index_add_(0, upload.tensor(users.index), table.tensor.index_select(0, upload.tensor(users.entries)))

        return StageWork(edit)

    def is_used_by(self, rows: Ints) -> bool:
        return self.entries.is_used_by(rows)

    def can_capture(self, rows: Ints) -> bool:
        return True

    def by_row(self, rows: Ints) -> ByRow:
        table, entries = self.table, self.entries.staged.device

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            add_entries_(logits, table.tensor, entries.index_select(0, batch.rows))

        return ByRow(("bias", table.shape), StageWork(edit), needs_sampling_dtype=True)
