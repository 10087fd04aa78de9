"""ProcessedRows: which rows have logits processors of one kind. Host only."""

from __future__ import annotations

import numpy as np

from slipstream.step import Ints, Processed, StepPlan


class ProcessedRows:
    def __init__(self, num_rows: int, kind: Processed) -> None:
        self._kind = kind
        self._has = np.zeros(num_rows, np.bool_)
        self._users: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        if self._users:
            gone = self._users.intersection(plan.released.tolist())
            self._users -= gone
            self._has[list(gone)] = False
        for admission in plan.admitted:
            if admission.processed & self._kind:
                self._users.add(admission.row)
                self._has[admission.row] = True

    def is_used_by(self, rows: Ints) -> bool:
        return bool(self._users) and bool(self._has[rows].any())
