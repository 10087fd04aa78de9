"""Rows that sit out a step: their masks were late, so they draw nothing and compute their last position again later.

The forward of the step is queued already. Before its head the row table gets back the row's length and its last token
without drafts, and the head draws for the padding row in its place, so no stage, no drafter and no table sees the draw.
Such steps are rare: this work is not captured.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slipstream.contracts.step import SitOut
from slipstream.device.device import Device
from slipstream.device.streams import Stream
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import HostRing


class SittingRows:
    def __init__(self, rows: RowTable, num_buffers: int, device: Device) -> None:
        self._table = rows
        self._ring = HostRing(num_buffers, 3 * 8 * len(rows.computed), device)

    def send(self, sit_out: SitOut, stream: Stream) -> Callable[[], torch.Tensor]:
        """Host: upload the rows. The returned work takes their positions back, and returns the rows [sitting]."""
        upload = self._ring.open()
        span = upload.put(np.stack([sit_out.rows, sit_out.computed, sit_out.tokens]).astype(np.int64))
        upload.send(stream)
        table = self._table

        def take_back() -> torch.Tensor:
            rows, computed, tokens = upload.tensor(span).unbind(0)
            table.computed.index_copy_(0, rows, computed)
            table.next_tokens[:, 0].index_copy_(0, rows, tokens)
            table.next_tokens[:, 1:].index_fill_(0, rows, -1)  # no masks are made along its drafts
            return rows

        return take_back


def leave_out_(rows: torch.Tensor, sitting: torch.Tensor | None, padding: int) -> None:
    """Device: put the padding row in the place of rows that sit out. `rows` [S] int64."""
    if sitting is not None:
        rows.masked_fill_((rows[:, None] == sitting).any(1), padding)
