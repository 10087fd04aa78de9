"""QueueLoad: what a front end has under way, in requests and tokens, and how fast it goes away."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class QueueLoad:
    """A prompt is queued until the core is heard of it for the first time, and open until it ends."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_queued = 0
        self.num_encoding = 0  # prompts that are tokenised, and will be queued then
        self.queued_tokens = 0
        self.queued_of: Counter[str] = Counter()  # prompts queued for each model, by name
        self.queued_by: Counter[str] = Counter()  # prompts that wait, by each caller that has any
        self._rate = 0.0  # requests that leave the queue in a second, lately
        self._since = time.monotonic()
        self._num_left = 0

    @property
    def num_waiting(self) -> int:
        """Prompts of which nothing was computed yet, tokenised or not."""
        return self.num_queued + self.num_encoding

    @contextmanager
    def encoding(self, count: int, caller: str = "") -> Iterator[None]:
        """While prompts are tokenised."""
        self.num_encoding += count
        self.queued_by[caller] += count
        try:
            yield
        finally:
            self.num_encoding -= count
            self._leave_queue(caller, count)

    def enter(self, model: str, num_tokens: int, caller: str = "") -> None:
        self.num_open += 1
        self.num_queued += 1
        self.queued_of[model] += 1
        self.queued_by[caller] += 1
        self.queued_tokens += num_tokens

    def start(self, model: str, num_tokens: int, caller: str = "") -> None:
        self.num_queued -= 1
        self.queued_of[model] -= 1
        self._leave_queue(caller, 1)
        self.queued_tokens -= num_tokens
        self._num_left += 1

    def _leave_queue(self, caller: str, count: int) -> None:
        self.queued_by[caller] -= count
        if not self.queued_by[caller]:
            del self.queued_by[caller]  # callers come and go

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
