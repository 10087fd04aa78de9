"""Pacer: decides how far to run ahead of the device, and how many prefill tokens a step may have, from measured times.

Steps launched ahead hide the host's work, but a new request waits behind them. About twice the host time of a step is
enough. While rows decode, a step with many prefill tokens delays their next tokens; `max_itl` bounds that delay.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.contracts.step import StepPlan

MIN_AHEAD = 0.005  # seconds: sleeping is not more precise than this
MAX_WAIT = 0.001  # seconds; then the caller runs: requests may have arrived, or the device may have finished early
MIN_WAIT = 0.0001
MIN_CHUNK = 64  # prefill tokens that a step may have in any case
_NEWEST = 0.3  # weight of the newest measurement


@dataclass(slots=True)
class _Step:
    kind: int
    num_tokens: int
    has_chunks: bool
    is_measured: bool  # its time is that of its positions: `on_decode`
    only_proposes: bool
    after_idle: bool
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
        # Called with positions and seconds of steps without prefill: on the device, and idle before because the host
        # was late; and whether the step proposes drafts and has none itself: its time is neither that of a step without
        # drafts nor that of one with drafts
        self.on_decode: Callable[[int, float, bool], None] | None = None
        self._clock = clock
        self._sleep = sleep
        self._steps: deque[_Step] = deque()
        self._seconds: dict[int, float] = {}  # device seconds per token, by kind of step
        self._after_idle: dict[int, float] = {}  # the same after an idle time: a cooler GPU is a fifth faster
        self._per_token: float | None = None  # device seconds per token of steps with chunks
        self._host = 0.0  # host seconds per step
        self._freed = 0.0  # when the device is last known to have started the oldest step in flight

    def is_early(self) -> bool:
        """Whether another step launched now would only make the queue longer."""
        return self.too_early() >= MIN_WAIT

    def wait_until_due(self) -> None:
        """Sleep briefly, at most until the next step is due."""
        self._sleep(max(0.0, min(self.too_early(), MAX_WAIT)))

    def too_early(self) -> float:
        """Seconds until another step is due; 0 or less: it is due now."""
        steps = self._steps
        if not steps:
            return 0.0
        ahead = sum(self._known(step).get(step.kind, 0.0) * step.num_tokens for step in steps)
        ahead -= self._clock() - max(steps[0].launched, self._freed)
        return ahead - max(2 * self._host, MIN_AHEAD)

    def max_num_tokens(self) -> int | None:
        """Maximum number of tokens of a step while rows decode; None: no limit."""
        if self.max_itl is None or self._per_token is None:
            return None
        return max(MIN_CHUNK, int(self.max_itl / self._per_token))

    def expected(self, plan: StepPlan) -> float:
        """Device seconds that a plan will take; 0 if no step of its kind was measured."""
        kind, num_tokens, _ = _kind(plan)
        return self._seconds.get(kind, 0.0) * num_tokens

    def launched(self, plan: StepPlan, host: float) -> None:
        """A plan was launched; `host`: host seconds for planning and launching it."""
        kind, num_tokens, has_chunks = _kind(plan)
        self._host += _NEWEST * (host - self._host)
        is_measured = not has_chunks and not plan.catches_up
        only_proposes = plan.num_proposed > 0 and not plan.has_drafts
        is_first = not self._steps
        step = _Step(kind, num_tokens, has_chunks, is_measured, only_proposes, is_first, self._clock(), host)
        self._steps.append(step)

    def committed(self, busy: float, idle: float = 0.0) -> None:
        """The oldest step is committed, after `busy` seconds on the device; 0: unknown. `idle`: seconds before it in
        which the device waited for the host."""
        step = self._steps.popleft()
        self._freed = self._clock()
        if busy <= 0:
            return
        if self.on_decode is not None and step.is_measured:
            self.on_decode(step.num_tokens, busy + idle, step.only_proposes)
        each = busy / step.num_tokens
        # otherwise the step probably waited for the host, as during a capture: `busy` is an upper bound
        is_exact = busy > 2 * step.host
        for known in [self._seconds, self._after_idle] if step.after_idle else [self._seconds]:
            before = known.get(step.kind, each)
            if is_exact or each < before:
                # Shorter times are used at once: launching early delays new requests slightly, launching late idles the
                # device.
                known[step.kind] = min(each, before + _NEWEST * (each - before))
        if step.has_chunks and step.num_tokens >= MIN_CHUNK:
            before = each if self._per_token is None else self._per_token
            if is_exact or each < before:
                self._per_token = before + _NEWEST * (each - before)

    def _known(self, step: _Step) -> dict[int, float]:
        return self._after_idle if step.after_idle else self._seconds


def _kind(plan: StepPlan) -> tuple[int, int, bool]:
    """Plans of one kind take about the same time per token. Returns the kind, the tokens, and whether it has chunks."""
    has_chunks = len(plan.tokens) > 0
    num_tokens = plan.total_tokens if has_chunks or plan.has_drafts else len(plan.rows)
    if plan.images is not None:
        num_tokens += plan.images.num_encoded  # about as much work as so many tokens of a prompt
    return 2 * num_tokens.bit_length() + has_chunks, num_tokens, has_chunks
