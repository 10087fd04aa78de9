"""GrammarMask: forbids tokens that the grammar or the logits processors of a row do not allow.

The host writes the masks to a pinned buffer while the device computes the step's forward. The device fetches them on
the copy stream, beside the forward; the head waits for that. One buffer is enough, and the table of masks can be
written at once: the host makes masks only when all older steps are committed.

The device keeps masks that the host expects again (`StepMasks`), and fetches only those that it does not have.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from slipstream.config.buffer_size import kept_mask_bytes, mask_bytes, mask_words, num_kept_masks
from slipstream.contracts.step import Admission, DrawEdits, Ints, Processed, StepMasks, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import TokenMask, fetch_masks_
from slipstream.runner.graphs import GraphPool
from slipstream.runner.sampling.stage import DrawBatch, Stage, StageRows, StageWork
from slipstream.runner.staging import HostRing, Upload


class GrammarMask(Stage):
    def __init__(
        self, num_rows: int, vocab_size: int, device: Device, max_drafts: int = 0, max_step_drafts: int = 0
    ) -> None:
        """`num_rows`: with the padding row. `max_drafts`: of a row in one step; `max_step_drafts`: of all rows."""
        self.device = device
        self.words = words = mask_words(vocab_size)
        num_bytes, num_kept = mask_bytes(num_rows, vocab_size, max_drafts, max_step_drafts), num_kept_masks(vocab_size)
        self.ring = HostRing(1, num_bytes, device, num_more=kept_mask_bytes(vocab_size))
        self._width = 1 + max_drafts
        self._max_masks = max_masks = num_rows - 1 + max_step_drafts
        # [rows * width] the mask of each draw: row, then offset; see `StepMasks`
        num_entries = num_rows * self._width
        # views at fixed addresses: of the host's buffer as arrays and, for captured work, as tensors
        host, arena = self.ring.buffers[0].tensor, self.ring.arena
        first, second = -(-num_entries * 4 // 16) * 16, -(-max_masks * 4 // 16) * 16
        self._entries, self._host_entries = (each[: num_entries * 4].view(torch.int32) for each in (arena, host))
        self._host_targets = host[first : first + max_masks * 4].view(torch.int32)
        start, size = first + second, words * 4
        self._host_bits = host[start : start + max_masks * size].view(torch.int32).view(-1, words)
        self._table = arena[start : start + (max_masks + num_kept) * size].view(torch.int32).view(-1, words)
        array = self.ring.buffers[0].array
        self._draws = array[: num_entries * 4].view(np.int32)
        self._targets = array[first : first + max_masks * 4].view(np.int32)
        self._bits = array[start : start + max_masks * size].view(np.int32).reshape(-1, words)
        self.rows = StageRows(num_rows, _is_masked)
        self._numbers = np.arange(max_masks, dtype=np.int32)
        self._default_entries = self._numbers.copy()
        self._open: tuple[Upload, StepMasks] | None = None  # not sent yet

    def apply(self, plan: StepPlan) -> None:
        self.rows.apply(plan)

    def flush(self, upload: Upload) -> None:
        """Nothing changes with an admission: masks come with every step."""

    def is_used_by(self, rows: Ints) -> bool:
        return self.rows.is_used_by(rows)

    def work(self, rows: Ints) -> StageWork:
        """Logits are not edited: the draw applies the mask as it reads them."""
        return StageWork("grammar", mask=self._mask)

    def _fetch(self, num_masks: int) -> None:
        """Device: fetch masks, and the entries of all draws."""
        bits, targets = self._host_bits[:num_masks], self._host_targets[:num_masks]
        fetch_masks_(self._table, bits, targets, self._entries, self._host_entries)

    def _mask(self, batch: DrawBatch) -> TokenMask:
        """Device: the masks of these draws."""
        index = batch.rows
        if self._width > 1:
            index = index * self._width if batch.offsets is None else index * self._width + batch.offsets
        return TokenMask(self._table, self._entries, index)

    def open(self, num_masks: int) -> StepMasks:
        """Host: where to write the masks of the step whose forward was launched last. `send` copies masks that are
        elsewhere."""
        upload = self.ring.open()
        entries, targets = self._default_entries[:num_masks], self._targets[:num_masks]
        entries[:] = targets[:] = self._numbers[:num_masks]
        masks = StepMasks(self._bits[:num_masks], entries, targets, self._max_masks)
        self._open = upload, masks
        return masks

    def send(self, late: DrawEdits, graphs: GraphPool | None = None) -> None:
        """Host: complete the buffer for the step whose forward was launched last, and fetch it. The head of the step is
        queued after this call. `graphs`: for the work of the device, whose launch costs more than its replay."""
        num = len(late.rows)
        if self._open is None or self._open[1].bits is not late.bits:
            masks = self.open(num)
            masks.bits[:] = late.bits
            assert late.entries is None, "masks that the device keeps are written where `open` tells"
        assert self._open is not None
        (upload, masks), self._open = self._open, None
        entries = late.entries
        if entries is None:
            assert masks.targets is not None
            entries = masks.targets[:] = self._numbers[:num]
        self._draws.fill(-1)
        self._draws[late.rows * self._width + (0 if late.offsets is None else late.offsets)] = entries
        size = num if graphs is None else min(graphs.rows_for(num) or num, self._max_masks)
        self._targets[num:size] = -1
        fetch = functools.partial(self._fetch, size)
        if graphs is not None and self.device.can_pin:
            fetch = functools.partial(graphs.run, ("fetch", size), fetch)
        copy = self.device.copy
        copy.run(fetch)
        fetched = copy.record()
        upload.guard(fetched)
        copy.flush()
        self.device.compute.wait_for(fetched)


def _is_masked(admission: Admission) -> bool:
    return admission.params.structured_outputs is not None or bool(admission.processed & Processed.TOKENS)
