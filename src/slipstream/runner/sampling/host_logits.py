"""HostLogits: runs the logits processors of the user that see logits.

The processor gets a copy of its row on the device, so its torch operations run on the compute stream. The cost: the
head of the step is not captured, and what the code does on the host delays the head of all rows of the step. A token
that was forbidden before (-inf) stays forbidden.

With several ranks the code runs on rank 0, which has its state, and the other ranks get the edited rows from there.
"""

from __future__ import annotations

import torch

from slipstream.contracts.step import Ints, Late, LogitsEdit, Processed, StepPlan
from slipstream.device.sync_check import sync_allowed
from slipstream.dist.group import Group
from slipstream.runner.batch.staging import Upload
from slipstream.runner.sampling.stage import DrawBatch, Stage, StageWork
from slipstream.runner.sampling.stage_rows import StageRows


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

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        if not self.is_used_by(rows):
            return None
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

        return StageWork(edit)

    def send(self, late: Late) -> None:
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
