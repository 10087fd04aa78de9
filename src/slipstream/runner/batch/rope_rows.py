"""RopeRows: the rows of the rope table that the tokens of a step read, for models with LongRoPE.

The table has the long factors first, then the short ones (`nn/layers/rope.py`). A request uses one kind while it holds
its row, so the device stores one offset per row.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.step import StepPlan
from slipstream.device.device import Device
from slipstream.runner.batch.staging import StagedTensor, Upload


class RopeRows:
    def __init__(self, num_rows: int, first_short: int, device: Device) -> None:
        """`first_short`: the row of the rope table with position 0 of the short factors."""
        self._first_short = first_short
        self._offsets = StagedTensor((num_rows,), np.int64, device)

    def apply(self, plan: StepPlan) -> None:
        for admission in plan.all_admitted:
            self._offsets.write(admission.row, 0 if admission.long_rope else self._first_short)

    def flush(self, upload: Upload) -> None:
        self._offsets.flush(upload)

    def of(self, positions: torch.Tensor, token_rows: torch.Tensor) -> torch.Tensor:
        """Device: rope-table rows of tokens at these positions of these rows, [T] each."""
        return self._offsets.device.index_select(0, token_rows) + positions
