"""RowTable: the computed length of each row, the token it drew last and its drafts, on the device.

The host knows none of these when it launches a step: the next step reads them from here.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.step import StepPlan
from slipstream.device.device import Device
from slipstream.ops.drafts import Accepted, DrawnTokens, accept_, store_drawn_
from slipstream.runner.batch.staging import StagedTensor, Upload


class RowTable:
    def __init__(self, num_rows: int, device: Device, max_drafts: int = 0) -> None:
        """`num_rows`: with the padding row, which is the last and has no computed position."""
        self._computed = StagedTensor((num_rows,), np.int64, device)
        # [num_rows] computed positions of the row
        self.computed = self._computed.device
        # [num_rows, 1 + max_drafts] the token drawn last, then drafts; -1: no draft. Drafts of an earlier row owner may
        # remain: a wrong draft is never accepted
        self.next_tokens = torch.zeros(num_rows, 1 + max_drafts, dtype=torch.int64, device=device.torch_device)

    def apply(self, plan: StepPlan) -> None:
        for admission in plan.all_admitted:
            self._computed.write(admission.row, admission.num_cached)

    def flush(self, upload: Upload) -> None:
        self._computed.flush(upload)

    @property
    def max_drafts(self) -> int:
        return self.next_tokens.shape[1] - 1

    def advance(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Device: the rows' positions are computed up to these lengths. A drafted row has several: `accept` follows."""
        self.computed.index_copy_(0, rows, lengths)

    def draw(
        self, rows: torch.Tensor, tokens: torch.Tensor, failed: torch.Tensor, out: Accepted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Device: store the tokens that these rows drew. Returns tokens and failed, at `out` if given."""
        return store_drawn_(self.next_tokens, rows, tokens, failed, None if out is None else (out.tokens, out.failed))

    def accept(self, drawn: DrawnTokens, out: Accepted | None = None) -> Accepted:
        """Device: store the last token that each row accepts, and take back the positions of its rejected drafts."""
        return accept_(self.next_tokens, self.computed, drawn, out)
