"""HostBias: adds the sparse biases of logits processors that see tokens.

Like masks, the biases are made while the device computes the step's forward, and have buffers of their own: one of each
kind, since the host makes them only when all older steps are committed.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.config.buffer_size import MAX_BIASED_IDS, bias_bytes
from slipstream.contracts.step import Ints, Late, Processed, StepPlan
from slipstream.device.device import Device
from slipstream.runner.batch.staging import HostRing, Upload
from slipstream.runner.sampling.stage import ByRow, DrawBatch, Stage, StageWork
from slipstream.runner.sampling.stage_rows import StageRows


class HostBias(Stage):
    def __init__(self, num_rows: int, device: Device) -> None:
        """`num_rows`: with the padding row."""
        self.device = device
        self.rows = StageRows(num_rows, lambda admission: bool(admission.processed & Processed.TOKENS))
        self.ring = HostRing(1, bias_bytes(num_rows), device)
        self._num_rows = num_rows
        # views of the arena, at fixed addresses for captured work
        arena, start = self.ring.arena, -(-num_rows * 4 // 16) * 16
        self._entries = arena[: num_rows * 4].view(torch.int32)  # [rows] entry of each row; -1: no bias
        size = (num_rows - 1) * 2 * MAX_BIASED_IDS * 4
        # [entries, 2, ids]: token ids, then the bits of their values in float32
        self._table = arena[start : start + size].view(torch.int32).view(-1, 2, MAX_BIASED_IDS)
        self._is_empty = False  # whether the device's entries are all -1

    def apply(self, plan: StepPlan) -> None:
        self.rows.apply(plan)

    def flush(self, upload: Upload) -> None:
        """Nothing changes with an admission: biases come with every step."""

    def is_used_by(self, rows: Ints) -> bool:
        return self.rows.is_used_by(rows)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        return self.by_row(rows).work if self.is_used_by(rows) else None

    def can_capture(self, rows: Ints) -> bool:
        return True

    def by_row(self, rows: Ints) -> ByRow:
        entries, table = self._entries, self._table

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            own = entries.index_select(0, batch.rows)
            found = table.index_select(0, own.clamp(min=0))
            values = found[:, 1].contiguous().view(torch.float32).to(logits.dtype)
            values = torch.where(own[:, None] >= 0, values, 0)
            logits.scatter_add_(1, found[:, 0].long(), values)

        return ByRow("host_bias", StageWork(edit), needs_sampling_dtype=True)

    def send(self, late: Late) -> None:
        """Host: copy the biases of the step whose forward was launched last."""
        bias = late.bias
        if bias is None and self._is_empty:
            return
        self._is_empty = bias is None
        upload = self.ring.open()
        _, entries = upload.room(np.int32, (self._num_rows,))
        entries.fill(-1)
        if bias is not None:
            count, width = bias.ids.shape
            entries[bias.rows] = np.arange(count, dtype=np.int32)
            _, table = upload.room(np.int32, (count, 2, MAX_BIASED_IDS))
            table[:, 0, :width], table[:, 0, width:] = bias.ids, 0
            table[:, 1, :width], table[:, 1, width:] = bias.values.astype(np.float32).view(np.int32), 0
        upload.send(self.device.copy)
        self.device.copy.flush()
        self.device.compute.wait_for(upload.sent)
