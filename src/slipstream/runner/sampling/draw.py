"""Draw: samples one token per row. The noise depends only on (seed, sample index, position), never on the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import (
    DRAW,
    Choice,
    DrawTables,
    argmax_rows,
    draw,
    draw_by_row,
    drop_below_,
    find_floor,
    row_key,
    step_keys,
)
from slipstream.params.sampling import SamplingParams
from slipstream.runner.sampling.stage import ByRow, DrawBatch, MaskOf, PenaltyOf, Stage, StageWork
from slipstream.runner.staging import StagedTensor, Upload

DrawWork = Callable[[torch.Tensor, DrawBatch], Choice]
"""Device: logits [S, V] to tokens [S]."""


class Draw:
    """Greedy rows take the likeliest token, the first of equal ones; the others add Gumbel noise made from their key.

    A row in which no token is left (-inf everywhere) draws token 0 and is marked as failed.
    """

    def __init__(self, num_rows: int, device: Device) -> None:
        self.random = np.zeros(num_rows, np.bool_)
        self._users: set[int] = set()  # rows that sample
        self.keys = StagedTensor((num_rows,), np.int64, device)
        self.is_random = StagedTensor((num_rows,), np.bool_, device)  # the device's copy of `random`

    def apply(self, plan: StepPlan) -> None:
        self._users.difference_update(plan.released.tolist())
        for admission in plan.admitted:
            random = not admission.params.is_greedy
            if random != self.random[admission.row]:
                self.random[admission.row] = random
                self.is_random.write(admission.row, random)
            if random:
                self._users.add(admission.row)
                self.keys.write(admission.row, row_key(admission.seed, admission.sample))

    def flush(self, upload: Upload) -> None:
        self.keys.flush(upload)
        self.is_random.flush(upload)

    def is_used_by(self, rows: Ints) -> bool:
        """Host: whether any of these rows samples."""
        return bool(self._users) and bool(self.random[rows].any())

    def prepare(self, rows: Ints, upload: Upload) -> DrawWork:
        """Host: the work that draws tokens [S] from logits [S, V]. Only sampling rows get noise."""
        if not self.is_used_by(rows):
            return greedy
        random = self.random[rows]
        keys = self.keys.device
        if random.all():
            return lambda logits, batch: draw(logits, _keys(keys, batch.rows, batch.positions))
        span = upload.put(np.flatnonzero(random))

        def mixed(logits: torch.Tensor, batch: DrawBatch) -> Choice:
            index = upload.tensor(span)
            own = _keys(keys, batch.rows.index_select(0, index), batch.positions.index_select(0, index))
            choice = argmax_rows(logits)
            choice.tokens.index_copy_(0, index, draw(logits.index_select(0, index), own).tokens)
            return choice

        return mixed

    def by_row(
        self, scale: Scale, limits: torch.Tensor | None, penalty_of: PenaltyOf | None, mask_of: MaskOf | None = None
    ) -> DrawWork:
        """Host: work that is the same for any rows. Masks, penalties, temperature and then limits are applied as the
        logits are read. `limits`: [rows, 3] as `find_floor` takes them; None if no row truncates."""
        tables = DrawTables(self.keys.device, self.is_random.device, scale.staged.device, limits)

        def drawn(logits: torch.Tensor, batch: DrawBatch) -> Choice:
            penalty = None if penalty_of is None else penalty_of(batch)
            mask = None if mask_of is None else mask_of(batch)
            return draw_by_row(logits, batch.rows, batch.positions, tables, penalty, mask)

        return drawn


def greedy(logits: torch.Tensor, batch: DrawBatch) -> Choice:
    return argmax_rows(logits)


def greedy_by_row(penalty_of: PenaltyOf | None, mask_of: MaskOf | None = None) -> DrawWork:
    """Host: the captured draw of greedy rows."""
    if penalty_of is None and mask_of is None:
        return greedy

    def drawn(logits: torch.Tensor, batch: DrawBatch) -> Choice:
        penalty = None if penalty_of is None else penalty_of(batch)
        return argmax_rows(logits, penalty, None if mask_of is None else mask_of(batch))

    return drawn


def _keys(keys: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return step_keys(keys.index_select(0, rows), positions, DRAW)


# Scale: divides logits by the temperature.


class Scale(Stage):
    """The temperature of each row. Greedy rows and free rows have 1."""

    def __init__(self, num_rows: int, device: Device, dtype: np.dtype[Any]) -> None:
        self.temperature = np.ones(num_rows)
        self._users: set[int] = set()  # rows whose temperature is not 1
        self.staged = StagedTensor((num_rows,), dtype, device, fill=1)

    def apply(self, plan: StepPlan) -> None:
        self._users.difference_update(plan.released.tolist())
        for admission in plan.admitted:
            row, params = admission.row, admission.params
            temperature = 1.0 if params.is_greedy else params.temperature
            if temperature != 1.0:
                self._users.add(row)
            if temperature != self.temperature[row]:
                self.temperature[row] = temperature
                self.staged.write(row, temperature)

    def flush(self, upload: Upload) -> None:
        self.staged.flush(upload)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        if not self.is_used_by(rows):
            return None
        temperature = self.staged.device

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            logits.div_(temperature.index_select(0, batch.rows)[:, None])

        return StageWork(edit)

    def is_used_by(self, rows: Ints) -> bool:
        return bool(self._users) and bool((self.temperature[rows] != 1.0).any())

    def can_capture(self, rows: Ints) -> bool:
        return True

    def by_row(self, rows: Ints) -> ByRow:
        """Nothing to add: a captured draw of random rows always divides by the temperature, which is 1 by default."""
        return ByRow(None)


# Truncate: min-p, then top-k, then top-p, as one floor for each row's logits.

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
