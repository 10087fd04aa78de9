"""Pace: how far to run ahead of the device, and how much prompt a step may carry, by what steps took so far.

Steps launched ahead hide the host's work, but whoever comes later waits behind them. A short time ahead is enough:
about twice what the host needs for a step. And while texts are being read, a step with much prompt in it makes their
readers wait; `max_itl` bounds that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.step import StepPlan

MIN_AHEAD = 0.005  # seconds: sleeping is no more exact than this
MAX_NAP = 0.001  # then the caller gets a turn: somebody may have come, or the device is done before its time
MIN_NAP = 0.0001
MIN_CHUNK = 64  # tokens of prompt that a step may have in any case
_NEWEST = 0.3  # what the newest measurement counts for


@dataclass(slots=True)
class _Step:
    kind: int
    num_tokens: int
    has_chunks: bool
    after_rest: bool
    launched: float
    host: float


class Pacer:
    def __init__(
        self,
        max_itl: float | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`max_itl` in seconds; None: no bound."""
        self.max_itl = max_itl
        self._clock = clock
        self._sleep = sleep
        self._steps: deque[_Step] = deque()
        self._seconds: dict[int, float] = {}  # for each token of a step of some kind
        self._rested: dict[int, float] = {}  # the same after a rest: a GPU that has cooled is a fifth quicker
        self._per_token: float | None = None  # of a step with chunks
        self._host = 0.0  # seconds that the host takes for a step
        self._freed = 0.0  # when the device was last known to begin with the oldest step in flight

    def is_early(self) -> bool:
        """Whether launching another step now would only lengthen the queue."""
        return self.too_early() >= MIN_NAP

    def nap(self) -> None:
        """Sleeps a little, and not past the time when the next step is due."""
        self._sleep(max(0.0, min(self.too_early(), MAX_NAP)))

    def too_early(self) -> float:
        """Seconds until another step is due; 0 or less: now."""
        steps = self._steps
        if not steps:
            return 0.0
        ahead = sum(self._known(step).get(step.kind, 0.0) * step.num_tokens for step in steps)
        ahead -= self._clock() - max(steps[0].launched, self._freed)
        return ahead - max(2 * self._host, MIN_AHEAD)

    def max_num_tokens(self) -> int | None:
        """That a step may have while rows decode; None: as many as fit."""
        if self.max_itl is None or self._per_token is None:
            return None
        return max(MIN_CHUNK, int(self.max_itl / self._per_token))

    def launched(self, plan: StepPlan, host: float) -> None:
        """A plan is on its way; `host` is what the host took for planning and launching it."""
        has_chunks = len(plan.tokens) > 0
        num_tokens = plan.total_tokens if has_chunks else len(plan.rows)
        kind = 2 * num_tokens.bit_length() + has_chunks
        self._host += _NEWEST * (host - self._host)
        self._steps.append(_Step(kind, num_tokens, has_chunks, not self._steps, self._clock(), host))

    def committed(self, busy: float) -> None:
        """The oldest step's result is there, after so many seconds on the device; 0: nobody knows."""
        step = self._steps.popleft()
        self._freed = self._clock()
        if busy <= 0:
            return
        each = busy / step.num_tokens
        # else it waited for the host in its middle, most likely, as one does that is being captured: it took no more
        is_exact = busy > 2 * step.host
        for known in [self._seconds, self._rested] if step.after_rest else [self._seconds]:
            before = known.get(step.kind, each)
            if is_exact or each < before:
                # believed at once where it took less: to be early costs newcomers a little, to be late idles the device
                known[step.kind] = min(each, before + _NEWEST * (each - before))
        if step.has_chunks and step.num_tokens >= MIN_CHUNK:
            before = each if self._per_token is None else self._per_token
            if is_exact or each < before:
                self._per_token = before + _NEWEST * (each - before)

    def _known(self, step: _Step) -> dict[int, float]:
        return self._rested if step.after_rest else self._seconds
