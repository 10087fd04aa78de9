"""QueueLoad: what a front end has under way, in requests and tokens, and how fast it goes away."""

from __future__ import annotations

import time
from collections import Counter


class QueueLoad:
    """A prompt is queued until the core is heard of it for the first time, and open until it ends."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_queued = 0
        self.queued_tokens = 0
        self.queued_of: Counter[str] = Counter()  # prompts queued for each model, by name
        self.queued_by: Counter[str] = Counter()  # prompts queued by each caller that has any
        self._rate = 0.0  # requests that leave the queue in a second, lately
        self._since = time.monotonic()
        self._num_left = 0

    def enter(self, model: str, num_tokens: int, caller: str = "") -> None:
        self.num_open += 1
        self.num_queued += 1
        self.queued_of[model] += 1
        self.queued_by[caller] += 1
        self.queued_tokens += num_tokens

    def start(self, model: str, num_tokens: int, caller: str = "") -> None:
        self.num_queued -= 1
        self.queued_of[model] -= 1
        self.queued_by[caller] -= 1
        if not self.queued_by[caller]:
            del self.queued_by[caller]  # callers come and go
        self.queued_tokens -= num_tokens
        self._num_left += 1

    def leave(self) -> None:
        self.num_open -= 1

    def seconds_to_drain(self) -> float:
        """A guess at how long those now queued will take to start; 1 where there is nothing to go by."""
        now = time.monotonic()
        if (passed := now - self._since) >= 1.0:
            recent = self._num_left / passed
            self._rate = recent if not self._rate else 0.5 * (self._rate + recent)
            self._since, self._num_left = now, 0
        return self.num_queued / self._rate if self._rate else 1.0
