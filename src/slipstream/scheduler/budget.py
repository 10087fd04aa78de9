"""Budget: what one step has left to give."""

from __future__ import annotations

from slipstream.config.config import SchedulerConfig

INTS_PER_PAGE = 3  # a page update is a row, a place and a page


class Budget:
    """Tokens to compute, free rows to seat newcomers in, and numbers that newcomers may stage.

    The device's upload arena is sized at start from `staged_ints`; page places, histories and lists of ids of many
    admissions could overflow it, so they are counted. The first admission of a step always fits: waiting longer would
    not make it smaller. Whoever sizes the arena therefore makes `staged_ints` at least what the largest request needs
    alone: 3 for each of its pages in every group, the model length once for a history, and its ids.
    """

    __slots__ = ("tokens", "rows", "ints", "_limit")

    def __init__(self, config: SchedulerConfig, free_rows: int) -> None:
        self.tokens = config.max_num_batched_tokens
        self.rows = free_rows
        self.ints = self._limit = config.staged_ints

    def can_stage(self, num_places: int, numbers: int) -> bool:
        return self._cost(num_places, numbers) <= self.ints

    def admit(self, tokens: int, num_places: int, numbers: int) -> None:
        """Spend one admission; `numbers` are its history and its ids."""
        self.tokens -= tokens
        self.rows -= 1
        self.ints -= self._cost(num_places, numbers)
        assert min(self.tokens, self.rows, self.ints) >= 0, f"overspent: {self.tokens}, {self.rows}, {self.ints}"

    def _cost(self, num_places: int, numbers: int) -> int:
        return min(num_places * INTS_PER_PAGE + numbers, self._limit)
