"""Scale: divides logits by the temperature."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.runner.batch.staging import StagedTensor, Upload
from slipstream.runner.sampling.stage import ByRow, DrawBatch, Stage, StageWork


class Scale(Stage):
    """The temperature of each row. Greedy rows and free rows have 1."""

    def __init__(self, num_rows: int, device: Device, dtype: np.dtype[Any]) -> None:
        self.temperature = np.ones(num_rows)
        self._users: set[int] = set()  # rows whose temperature is not 1
        self.staged = StagedTensor((num_rows,), dtype, device, fill=1)

    def apply(self, plan: StepPlan) -> None:
        self._users.difference_update(plan.released.tolist())
        for admission in plan.admitted:
            row, params = admission.row, admission.params
            temperature = 1.0 if params.is_greedy else params.temperature
            if temperature != 1.0:
                self._users.add(row)
            if temperature != self.temperature[row]:
                self.temperature[row] = temperature
                self.staged.write(row, temperature)

    def flush(self, upload: Upload) -> None:
        self.staged.flush(upload)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        if not self.is_used_by(rows):
            return None
        temperature = self.staged.device

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            logits.div_(temperature.index_select(0, batch.rows)[:, None])

        return StageWork(edit)

    def is_used_by(self, rows: Ints) -> bool:
        return bool(self._users) and bool((self.temperature[rows] != 1.0).any())

    def can_capture(self, rows: Ints) -> bool:
        return True

    def by_row(self, rows: Ints) -> ByRow:
        """Nothing to add: a captured draw of random rows always divides by the temperature, which is 1 by default."""
        return ByRow(None)
