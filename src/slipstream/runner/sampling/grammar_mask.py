"""GrammarMask: forbids tokens that the grammar or the logits processors of a row do not allow.

The host writes the masks to a pinned buffer while the device computes the step's forward. The copy to the device is
part of the head, so that it is captured and costs the host nothing; it runs beside the GEMM of the logits. One buffer
is enough: the host makes masks only when all older steps are committed.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.config.buffer_size import mask_bytes, mask_words
from slipstream.device.device import Device
from slipstream.device.streams import Event
from slipstream.ops.sample import mask_bits_
from slipstream.runner.batch.staging import HostRing, Upload
from slipstream.runner.sampling.stage import ByRow, DrawBatch, Stage, StageWork
from slipstream.runner.sampling.stage_rows import StageRows
from slipstream.step import Admission, Ints, Late, Processed, StepPlan


class GrammarMask(Stage):
    def __init__(
        self, num_rows: int, vocab_size: int, device: Device, max_drafts: int = 0, max_step_drafts: int = 0
    ) -> None:
        """`num_rows`: with the padding row. `max_drafts`: of a row in one step; `max_step_drafts`: of all rows."""
        # a CUDA graph cannot copy from pageable memory
        self._can_capture = device.can_pin or device.torch_device.type == "cpu"
        self.words = words = mask_words(vocab_size)
        self.ring = HostRing(1, mask_bytes(num_rows, vocab_size, max_drafts, max_step_drafts), device)
        self._width = 1 + max_drafts
        self._num_entries = num_rows * self._width
        # views of the arena, at fixed addresses for captured work
        arena, self._start = self.ring.arena, -(-self._num_entries * 4 // 16) * 16
        # [rows * width] entry of each draw: row, then offset; -1: no mask
        self._entries = arena[: self._num_entries * 4].view(torch.int32)
        size = (num_rows - 1 + max_step_drafts) * words * 4
        self._bits = arena[self._start : self._start + size].view(torch.int32).view(-1, words)
        self.rows = StageRows(num_rows, _is_masked)
        self._open: tuple[Upload, Ints, Ints] | None = None  # an upload with its entries and masks, not sent yet
        self._upload: Upload | None = None  # sent, and not guarded yet

    def apply(self, plan: StepPlan) -> None:
        self.rows.apply(plan)

    def flush(self, upload: Upload) -> None:
        """Nothing changes with an admission: masks come with every step."""

    def is_used_by(self, rows: Ints) -> bool:
        return self.rows.is_used_by(rows)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        return self.by_row(rows).work if self.is_used_by(rows) else None

    def can_capture(self, rows: Ints) -> bool:
        return self._can_capture

    def by_row(self, rows: Ints) -> ByRow:
        entries, bits, width = self._entries, self._bits, self._width
        arena, host, start = self.ring.arena, self.ring.buffers[0].tensor, self._start

        def bring(num_draws: int) -> None:
            size = start + min(num_draws, len(bits)) * bits.stride(0) * 4
            arena[:size].copy_(host[:size], non_blocking=True)

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            draws = batch.rows * width
            mask_bits_(logits, bits, entries.index_select(0, draws if batch.offsets is None else draws + batch.offsets))

        return ByRow("grammar", StageWork(edit, bring=bring))

    def open(self, num_masks: int) -> Ints:
        """Host: where to write the masks of the step whose forward was launched last. `send` copies masks that are
        elsewhere."""
        upload = self.ring.open()
        _, entries = upload.room(np.int32, (self._num_entries,))
        _, bits = upload.room(np.int32, (num_masks, self.words))
        self._open = upload, entries, bits
        return bits

    def send(self, late: Late) -> None:
        """Host: complete the buffer for the step whose forward was launched last. Its head is queued after this call,
        and copies the buffer."""
        if self._open is None or self._open[2] is not late.bits:
            self.open(len(late.rows))[:] = late.bits
        assert self._open is not None
        (self._upload, entries, _), self._open = self._open, None
        entries.fill(-1)
        draws = late.rows * self._width + (0 if late.offsets is None else late.offsets)
        entries[draws] = np.arange(len(draws), dtype=np.int32)

    def guard(self, ended: Event) -> None:
        """Host: `ended` is after the head that copies the buffer sent last."""
        if self._upload is not None:
            self._upload.guard(ended)
            self._upload = None


def _is_masked(admission: Admission) -> bool:
    return admission.params.structured_outputs is not None or bool(admission.processed & Processed.TOKENS)
