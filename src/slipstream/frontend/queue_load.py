"""QueueLoad: the requests and tokens of one front end, and the rate at which its queue empties."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class QueueLoad:
    """A prompt is queued until its first output arrives, and open until it is finished."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_queued = 0
        self.num_encoding = 0  # prompts that are being tokenised, before they are queued
        self.queued_tokens = 0
        self.queued_of: Counter[str] = Counter()  # queued prompts by model
        self.queued_by: Counter[str] = Counter()  # queued and encoding prompts by caller, without zeros
        self._rate = 0.0  # requests per second that leave the queue, a moving average
        self._since = time.monotonic()
        self._num_started = 0

    @property
    def num_not_started(self) -> int:
        """Prompts that are queued or being tokenised. The core's `num_waiting` counts samples without a row instead."""
        return self.num_queued + self.num_encoding

    @contextmanager
    def encoding(self, count: int, caller: str = "") -> Iterator[None]:
        """A context in which `count` prompts are being tokenised."""
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
        self._num_started += 1

    def _leave_queue(self, caller: str, count: int) -> None:
        self.queued_by[caller] -= count
        if not self.queued_by[caller]:
            del self.queued_by[caller]  # the number of callers has no bound

    def finish(self) -> None:
        self.num_open -= 1

    def seconds_to_drain(self) -> float:
        """An estimate of the time until all queued prompts have started; 1 second before there is a rate."""
        now = time.monotonic()
        if (passed := now - self._since) >= 1.0:
            recent = self._num_started / passed
            self._rate = recent if not self._rate else 0.5 * (self._rate + recent)
            self._since, self._num_started = now, 0
        return self.num_queued / self._rate if self._rate else 1.0
