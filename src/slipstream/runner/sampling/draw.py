"""Draw: samples one token per row. The noise depends only on (seed, sample index, position), never on the batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sample import DRAW, Choice, DrawTables, argmax_rows, draw, draw_by_row, row_key, step_keys
from slipstream.runner.batch.staging import StagedTensor, Upload
from slipstream.runner.sampling.scale import Scale
from slipstream.runner.sampling.stage import DrawBatch, MaskOf, PenaltyOf

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
