"""Truncate: min-p, then top-k, then top-p, as one floor for each row's logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sample import drop_below_, find_floor
from slipstream.params.sampling import SamplingParams
from slipstream.runner.batch.staging import StagedTensor, Upload
from slipstream.runner.sampling.stage import ByRow, DrawBatch, Stage, StageWork

_NO_TOP_P = 2.0  # a sum of probabilities that rounding never reaches

# what finding a row's floor needs
_NONE, _BEST, _TOP_K, _ALL = range(4)


class Truncate(Stage):
    """All three keep the likeliest tokens, so together they keep all tokens from some logit up, ties included.

    Rows are grouped by what finding the floor needs: the largest logit (min-p only), the k largest (top-k, and top-p
    among them), or all logits sorted (top-p without top-k). Greedy rows and rows without truncation are in no group. A
    row's floor does not depend on the other rows of its group.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device, dtype: np.dtype[Any]) -> None:
        self.vocab_size = vocab_size
        self.group = np.full(num_rows, _NONE, np.int8)
        self._users: set[int] = set()  # rows that are in a group
        self.top_k = np.zeros(num_rows, np.int64)  # the vocabulary size without top-k
        self.limits = StagedTensor((num_rows, 3), dtype, device)  # log of min_p, top_k, top_p
        self._keep_all = (-math.inf, vocab_size, _NO_TOP_P)
        for column, value in zip(self.limits.device.unbind(1), self._keep_all, strict=True):
            column.fill_(value)

    def apply(self, plan: StepPlan) -> None:
        self._users.difference_update(plan.released.tolist())
        for admission in plan.admitted:
            row, params = admission.row, admission.params
            before, group = self.group[row], self._group_of(params)
            self.group[row] = group
            if group == _NONE:
                if before != _NONE:
                    self.limits.write(row, self._keep_all)
                continue
            self._users.add(row)
            self.top_k[row] = top_k = params.top_k if group == _TOP_K else self.vocab_size
            log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
            self.limits.write(row, (log_min_p, top_k, params.top_p if params.top_p < 1 else _NO_TOP_P))

    def _group_of(self, params: SamplingParams) -> int:
        if params.is_greedy:
            return _NONE
        if 0 < params.top_k < self.vocab_size:
            return _TOP_K
        if params.top_p < 1:
            return _ALL
        return _BEST if params.min_p > 0 else _NONE

    def flush(self, upload: Upload) -> None:
        self.limits.flush(upload)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        if not self.is_used_by(rows):
            return None
        group = self.group[rows]
        groups = []
        for which in (_BEST, _TOP_K, _ALL):
            index = np.flatnonzero(group == which)
            if len(index):
                max_k = 0 if which == _BEST else int(self.top_k[rows[index]].max())
                groups.append((upload.put(index), max_k))
        limits = self.limits.device

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            order = [(upload.tensor(index), max_k) for index, max_k in groups]
            drop_below_(logits, find_floor(logits, limits.index_select(0, batch.rows), order))

        return StageWork(edit)

    def is_used_by(self, rows: Ints) -> bool:
        return bool(self._users) and bool(self.group[rows].any())

    def can_capture(self, rows: Ints) -> bool:
        return True

    def by_row(self, rows: Ints) -> ByRow:
        """Logits are not edited: the draw applies the limits as it reads them."""
        return ByRow("truncate", limits=self.limits.device)
