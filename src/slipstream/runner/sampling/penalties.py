"""Penalties: repetition, presence and frequency penalties, from token counts on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.contracts.step import Admission, Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import IN_OUTPUT, IN_PROMPT, Penalty, count_
from slipstream.runner.sampling.stage import DrawBatch, Entries, EntryTable, Stage, StageWork
from slipstream.runner.staging import StagedTensor, Upload


class Penalties(Stage):
    """An entry per penalised row: flags for tokens of prompt and output, counts for tokens of the output.

    The history is uploaded at admission; after that, each token is counted on the device when it is drawn and
    accepted. A draw after drafts also counts these drafts: its token is accepted only if they are.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device, dtype: np.dtype[Any]) -> None:
        self.vocab_size = vocab_size
        self.entries = Entries(num_rows, device)
        self.counts = EntryTable(num_rows, vocab_size, torch.int32, device)
        self.seen = EntryTable(num_rows, vocab_size, torch.uint8, device)
        self.values = StagedTensor((num_rows, 3), dtype, device)  # repetition, presence, frequency
        self._new: list[tuple[int, Admission]] = []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.entries.free(row)
        for admission in plan.admitted:
            params = admission.params
            if params.has_penalties:
                values = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
                self.values.write(admission.row, values)
                self._new.append((self.entries.assign(admission.row), admission))

    def flush(self, upload: Upload) -> None:
        self.values.flush(upload)
        self.entries.flush(upload)
        if self._new:
            num_entries = 1 + max(entry for entry, _ in self._new)
            self.counts.reserve(num_entries, upload)
            self.seen.reserve(num_entries, upload)
        for entry, admission in self._new:
            self._write(entry, admission, upload)
        self._new = []

    def _write(self, entry: int, admission: Admission, upload: Upload) -> None:
        assert admission.history is not None, f"row {admission.row} has penalties and came without its history"
        counts, seen = self.counts, self.seen
        span, num_prompt = upload.put(admission.history), admission.num_history_prompt

        def write() -> None:
            history = upload.tensor(span).long()
            output = history[num_prompt:]
            counted = counts.tensor[entry].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            flags = seen.tensor[entry].copy_(counted > 0).mul_(IN_OUTPUT)
            flags.index_copy_(0, history[:num_prompt], flags.index_select(0, history[:num_prompt]) | IN_PROMPT)

        upload.then(write)

    def is_used_by(self, rows: Ints) -> bool:
        return self.entries.is_used_by(rows)

    def work(self, rows: Ints) -> StageWork:
        """Logits are not edited: the draw applies the penalty as it reads them."""
        key, users = ("penalties", self.counts.shape), self.entries.users(rows)
        return StageWork(key, drawn=self._count, users=users, penalty=self._penalty)

    def _count(self, tokens: torch.Tensor, batch: DrawBatch, kept: torch.Tensor | None) -> None:
        """Device: count the accepted tokens of rows with an entry. A row that sits out the step is not in the batch."""
        entries = self.entries.of(batch)
        entries = entries if kept is None else torch.where(kept, entries, -1)
        count_(self.counts.tensor, self.seen.tensor, entries, tokens)

    def _penalty(self, batch: DrawBatch) -> Penalty:
        """Device: the penalties of these rows, for the draw."""
        entries, values = self.entries.of(batch), self.values.device.index_select(0, batch.rows)
        return Penalty(self.counts.tensor, self.seen.tensor, entries, values, batch.earlier)
