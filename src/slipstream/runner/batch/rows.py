"""RowTable: the computed length of each row and the token it drew last, on the device.

The host does not know either when it launches a step: the next step reads the new token from here.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.runner.batch.staging import StagedTensor, Upload
from slipstream.step import StepPlan


class RowTable:
    def __init__(self, num_rows: int, device: Device) -> None:
        self._computed = StagedTensor((num_rows,), np.int64, device)
        # [num_rows] computed positions of the row
        self.computed = self._computed.device
        # [num_rows] the token drawn last
        self.last_token = torch.zeros(num_rows, dtype=torch.int64, device=device.torch_device)

    def apply(self, plan: StepPlan) -> None:
        for admission in plan.all_admitted:
            self._computed.write(admission.row, admission.num_cached)

    def flush(self, upload: Upload) -> None:
        self._computed.flush(upload)

    def advance(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Device: the rows' positions are computed up to these lengths."""
        self.computed.index_copy_(0, rows, lengths)

    def draw(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Device: store the tokens that these rows drew."""
        self.last_token.index_copy_(0, rows, tokens)
