"""Penalties: repetition, presence and frequency, from counts that only the device keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.ops.sample import count_, penalize_
from slipstream.runner.batch.staging import StagedTensor, Upload
from slipstream.runner.sampling.slots import Slots, SlotTable
from slipstream.runner.sampling.stage import ByRow, SampleBatch, StageWork
from slipstream.step import Admission, Ints, StepPlan


class Penalties:
    """What a row has seen: its prompt as a mask, its output as counts, one slot for each row that is penalised.

    The host brings the history when the row is admitted; afterwards each token is counted where it was drawn.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device, dtype: np.dtype[Any]) -> None:
        self.vocab_size = vocab_size
        self.slots = Slots(num_rows, device)
        self.counts = SlotTable(num_rows, vocab_size, torch.int32, device)
        self.in_prompt = SlotTable(num_rows, vocab_size, torch.bool, device)
        self.values = StagedTensor((num_rows, 3), dtype, device)  # repetition, presence, frequency
        self._new: list[tuple[int, Admission]] = []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.slots.release(row)
        for admission in plan.admitted:
            params = admission.params
            if params.has_penalties:
                values = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
                self.values.write(admission.row, values)
                self._new.append((self.slots.take(admission.row), admission))

    def flush(self, upload: Upload) -> None:
        self.values.flush(upload)
        self.slots.flush(upload)
        if self._new:
            most = 1 + max(slot for slot, _ in self._new)
            self.counts.reserve(most, self.vocab_size, upload)
            self.in_prompt.reserve(most, self.vocab_size, upload)
        for slot, admission in self._new:
            self._write(slot, admission, upload)
        self._new = []

    def _write(self, slot: int, admission: Admission, upload: Upload) -> None:
        assert admission.history is not None, f"row {admission.row} has penalties and came without its history"
        counts, in_prompt = self.counts, self.in_prompt
        span, num_prompt = upload.put(admission.history), admission.num_prompt_tokens

        def write() -> None:
            history = upload.tensor(span).long()
            output = history[num_prompt:]
            in_prompt.tensor[slot].zero_().index_fill_(0, history[:num_prompt], True)
            counts.tensor[slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

        upload.then(write)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        users = self.slots.users(rows, upload)
        if users is None:
            return None
        index_span, slot_span = users.index, users.slots
        counts, in_prompt, values, vocab_size = self.counts, self.in_prompt, self.values.device, self.vocab_size

        def edit(logits: torch.Tensor, batch: SampleBatch) -> None:
            index, slots = upload.tensor(index_span), upload.tensor(slot_span)
            own = values.index_select(0, batch.rows.index_select(0, index))
            penalize_(logits, index, counts.tensor, in_prompt.tensor, slots, own)

        def drawn(tokens: torch.Tensor, batch: SampleBatch) -> None:
            places = upload.tensor(slot_span) * vocab_size + tokens.index_select(0, upload.tensor(index_span))
            counts.tensor.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

        return StageWork(edit, drawn)

    def asks(self, rows: Ints) -> bool:
        return self.slots.asks(rows)

    def by_row(self, rows: Ints) -> ByRow:
        counts, in_prompt, values, held = self.counts, self.in_prompt, self.values.device, self.slots.staged.device

        def edit(logits: torch.Tensor, batch: SampleBatch) -> None:
            slots = held.index_select(0, batch.rows)
            penalize_(logits, None, counts.tensor, in_prompt.tensor, slots, values.index_select(0, batch.rows))

        def drawn(tokens: torch.Tensor, batch: SampleBatch) -> None:
            count_(counts.tensor, held.index_select(0, batch.rows), tokens)

        return ByRow(("penalties", counts.shape), StageWork(edit, drawn))
