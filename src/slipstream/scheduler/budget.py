"""Budget: the resources of one step that are not used yet."""

from __future__ import annotations

from slipstream.config.config import SchedulerConfig

INTS_PER_PAGE = 3  # a page update is a row, an entry and a page


class Budget:
    """Tokens to compute, free rows, and integers that admissions may upload.

    The device's upload arena has a fixed size, computed from `staged_ints`. Page-table entries, histories and id lists
    of many admissions could overflow it, so they are counted. The first admission of a step always fits: it would not
    become smaller by waiting. So `staged_ints` must be at least what the largest single request needs: 3 for each of
    its pages in every group, the model length once for a history, and its ids.
    """

    __slots__ = ("tokens", "rows", "ints", "_limit")

    def __init__(self, config: SchedulerConfig, free_rows: int) -> None:
        self.tokens = config.max_num_batched_tokens
        self.rows = free_rows
        self.ints = self._limit = config.staged_ints

    def can_stage(self, num_entries: int, num_ints: int) -> bool:
        return self._cost(num_entries, num_ints) <= self.ints

    def admit(self, tokens: int, num_entries: int, num_ints: int) -> None:
        """Subtract one admission; `num_ints` counts its history and its ids."""
        self.tokens -= tokens
        self.rows -= 1
        self.ints -= self._cost(num_entries, num_ints)
        assert min(self.tokens, self.rows, self.ints) >= 0, f"overspent: {self.tokens}, {self.rows}, {self.ints}"

    def _cost(self, num_entries: int, num_ints: int) -> int:
        return min(num_entries * INTS_PER_PAGE + num_ints, self._limit)
