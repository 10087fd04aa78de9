"""StageRows: which rows use a sampling stage. Host only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.contracts.step import Admission, Ints, StepPlan


class StageRows:
    def __init__(self, num_rows: int, uses: Callable[[Admission], bool]) -> None:
        """`uses`: whether the row of this admission uses the stage."""
        self._uses = uses
        self._is_user = np.zeros(num_rows, np.bool_)
        self._users: set[int] = set()

    def apply(self, plan: StepPlan) -> tuple[list[int], list[Admission]]:
        """Returns the rows that no longer use the stage because they were released, and the admissions that do."""
        gone: list[int] = []
        if self._users:
            gone = [row for row in plan.released.tolist() if row in self._users]
            self._users.difference_update(gone)
            self._is_user[gone] = False
        admitted = [admission for admission in plan.admitted if self._uses(admission)]
        for admission in admitted:
            self._users.add(admission.row)
            self._is_user[admission.row] = True
        return gone, admitted

    def is_used_by(self, rows: Ints) -> bool:
        return bool(self._users) and bool(self._is_user[rows].any())
