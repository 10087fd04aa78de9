"""LogitBias: allowed ids and logit bias, as one value to add to the logit of each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.config.buffer_size import MAX_BIASED_IDS, bias_bytes
from slipstream.contracts.step import DrawEdits, Ints, LogitsEdit, Processed, StepPlan
from slipstream.device.collectives import Group
from slipstream.device.device import Device
from slipstream.device.sync_check import sync_allowed
from slipstream.ops.sampling import add_entries_
from slipstream.params.sampling import SamplingParams
from slipstream.runner.sampling.stage import DrawBatch, Entries, EntryTable, Stage, StageRows, StageWork
from slipstream.runner.staging import HostRing, Upload


class LogitBias(Stage):
    """A row that uses it has an entry of the table: -inf for tokens that are not allowed, else the bias or 0."""

    def __init__(
        self, num_rows: int, vocab_size: int, device: Device, dtype: np.dtype[Any], torch_dtype: torch.dtype
    ) -> None:
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.entries = Entries(num_rows, device)
        self.table = EntryTable(num_rows, vocab_size, torch_dtype, device)
        self._new: list[tuple[int, SamplingParams]] = []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.entries.free(row)
        for admission in plan.admitted:
            params = admission.params
            if params.allowed_token_ids is not None or params.logit_bias is not None:
                self._new.append((self.entries.assign(admission.row), params))

    def flush(self, upload: Upload) -> None:
        self.entries.flush(upload)
        if self._new:
            self.table.reserve(1 + max(entry for entry, _ in self._new), upload)
        for entry, params in self._new:
            self._write(entry, params, upload)
        self._new = []

    def _write(self, entry: int, params: SamplingParams, upload: Upload) -> None:
        table = self.table
        allowed = bias = values = None
        if params.allowed_token_ids is not None:
            allowed = upload.put(np.array(params.allowed_token_ids, np.int32))
        if params.logit_bias is not None:
            bias = upload.put(np.array(list(params.logit_bias), np.int32))
            values = upload.put(np.array(list(params.logit_bias.values()), self.dtype))

        def write() -> None:
            own = table.tensor[entry]
            own.fill_(0 if allowed is None else -torch.inf)
            if allowed is not None:
                own.index_fill_(0, upload.tensor(allowed).long(), 0)
            if bias is not None and values is not None:
                own.index_add_(0, upload.tensor(bias).long(), upload.tensor(values))

        upload.then(write)

    def is_used_by(self, rows: Ints) -> bool:
        return self.entries.is_used_by(rows)

    def work(self, rows: Ints) -> StageWork:
        table, entries = self.table, self.entries

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            add_entries_(logits, batch.draws, table.tensor, entries.of(batch))

        return StageWork(("bias", table.shape), edit, needs_sampling_dtype=True, users=entries.users(rows))


# HostBias: adds the sparse biases of logits processors that see tokens.
#
# Like masks, the biases are made while the device computes the step's forward, and have buffers of their own: one of
# each kind, since the host makes them only when all older steps are committed.


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

    def work(self, rows: Ints) -> StageWork:
        entries, table = self._entries, self._table

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            own = entries.index_select(0, batch.rows)
            found = table.index_select(0, own.clamp(min=0))
            values = found[:, 1].contiguous().view(torch.float32).to(logits.dtype)
            values = torch.where(own[:, None] >= 0, values, 0)
            logits.scatter_add_(1, found[:, 0].long(), values)

        return StageWork("host_bias", edit, needs_sampling_dtype=True)

    def send(self, late: DrawEdits) -> None:
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


# HostLogits: runs the logits processors of the user that see logits.
#
# The processor gets a copy of its row on the device, so its torch operations run on the compute stream. The cost: the
# head of the step is not captured, and what the code does on the host delays the head of all rows of the step. A token
# that was forbidden before (-inf) stays forbidden.
#
# With several ranks the code runs on rank 0, which has its state, and the other ranks get the edited rows from there.


class HostLogits(Stage):
    def __init__(self, num_rows: int, *, is_scaled: bool) -> None:
        """`is_scaled`: the stage is after the temperature, for processors that do not change the likeliest token."""
        kind = Processed.SCALED if is_scaled else Processed.LOGITS
        self.rows = StageRows(num_rows, lambda admission: bool(admission.processed & kind))
        self.group: Group | None = None  # of the ranks that share the model; None: there is one
        self._is_scaled = is_scaled
        self._newest: list[LogitsEdit] = []  # of the step prepared last; filled by `send`

    def apply(self, plan: StepPlan) -> None:
        self.rows.apply(plan)

    def flush(self, upload: Upload) -> None:
        """Nothing changes with an admission: edits come with every step."""

    def is_used_by(self, rows: Ints) -> bool:
        return self.rows.is_used_by(rows)

    def work(self, rows: Ints) -> StageWork:
        edits = self._newest = []  # a list of its own: the work of an older step may still have to run
        index_of = {row: index for index, row in enumerate(rows.tolist())}

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            edited: dict[int, None] = {}
            for each in edits:
                indices = [index_of[row] for row in each.rows if row >= 0]
                edited |= dict.fromkeys(indices)
                if self.group is None or self.group.rank == 0:
                    _run(each, logits, indices)
            if self.group is not None and edited:
                _copy_from_first(self.group, logits, list(edited))

        return StageWork(None, edit, reads=True)

    def send(self, late: DrawEdits) -> None:
        """Host: the edits of the step whose forward was launched last."""
        self._newest += [edit for edit in late.edits if edit.is_scaled == self._is_scaled]
        self._newest = []


def _copy_from_first(group: Group, logits: torch.Tensor, indices: list[int]) -> None:
    """Device: these rows have the values of rank 0 on all ranks."""
    rows = group.broadcast(torch.stack([logits[index] for index in indices]))
    for row, index in zip(rows, indices, strict=True):
        logits[index].copy_(row)


def _run(edit: LogitsEdit, logits: torch.Tensor, indices: list[int]) -> None:
    """Device: run one processor on a copy of its rows. If it fails, its rows have no allowed token."""
    try:
        with sync_allowed("a logits processor is code of the user"):
            if edit.is_batched:
                _run_batch(edit, logits, indices)
            else:
                before = logits[indices[0]]
                before.copy_(_checked(edit.run(before.clone()), before))
    except Exception as error:
        edit.fail(error)
        for index in indices:
            logits[index].fill_(-torch.inf)


def _run_batch(edit: LogitsEdit, logits: torch.Tensor, indices: list[int]) -> None:
    samples = [sample for sample, row in enumerate(edit.rows) if row >= 0]
    batch = logits.new_zeros((len(edit.rows), logits.shape[1]))
    for sample, index in zip(samples, indices, strict=True):
        batch[sample].copy_(logits[index])
    result = edit.run(batch.clone())
    result = _checked(result, batch)
    for sample, index in zip(samples, indices, strict=True):
        logits[index].copy_(result[sample])


def _checked(result: object, before: torch.Tensor) -> torch.Tensor:
    """The result of a processor, in which what was forbidden before is forbidden."""
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"it returned {type(result).__name__}; return a tensor like logits")
    if result.shape != before.shape or not result.dtype.is_floating_point:
        raise ValueError(
            f"it returned a tensor of {tuple(result.shape)} {result.dtype}; logits has {tuple(before.shape)} "
            f"{before.dtype}"
        )
    return torch.where(before == -torch.inf, before, result.to(before))
