"""Backoff: the delay before a process that has died is started again."""

from __future__ import annotations

from collections import deque


class Backoff:
    """The delay before a restart: doubled with each death within `window` seconds, and none after `limit` deaths."""

    def __init__(self, limit: int = 5, window: float = 600.0, first: float = 0.5, longest: float = 30.0) -> None:
        self.limit = limit
        self.window = window
        self._first = first
        self._longest = longest
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Notes a death. Returns the seconds until the restart; None: no restart."""
        self._deaths.append(now)
        while self._deaths[0] < now - self.window:
            self._deaths.popleft()
        if len(self._deaths) >= self.limit:
            return None
        return min(self._longest, self._first * 2.0 ** (len(self._deaths) - 1))
