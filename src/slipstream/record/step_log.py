"""StepLog: times and sizes of every step while a viewer reads them: host and device, and each idle gap's cause.

It is off by default, and costs nothing then. Busy times and gaps are the device's own. Their sum gives the start of a
step on the host's clock, corrected by what the host knows: the step started after its launch, and has ended now.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Protocol

import msgspec
import numpy as np

from slipstream.contracts.step import Ints, StepPlan, StepResult
from slipstream.scheduler.step_scheduler import StepScheduler

MAX_STEPS = 1 << 15


class LoggedCore(Protocol):
    """The parts of an `EngineCore` that a log reads and sets."""

    step_log: LaneLog | None

    @property
    def scheduler(self) -> StepScheduler[Any]: ...
    @property
    def num_untimed(self) -> int: ...
    @property
    def in_flight(self) -> Sized: ...


class StepTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step. Times are seconds of one clock."""

    number: int  # over all models, without gaps
    lane: int  # index of the model
    launched: float  # when its launch ended
    host: float  # host seconds of the core for this step: planning, launching, and committing an older step
    start: float  # on the device
    end: float
    gap: float  # idle seconds of the device before it
    cause: str  # of the gap
    late: float  # idle seconds within the step, before its head: masks or logits processors came late
    rows: int
    tokens: int
    prefill_tokens: int  # of prompts
    drawn: int  # tokens; drafts that are rejected are among them
    running: int
    waiting: int
    free_pages: int
    num_pages: int
    drafts: int = 0  # drafted tokens
    accepted: int = 0  # drafted tokens that were accepted


class StepLog:
    """The steps of all models of a device."""

    def __init__(self, cores: Mapping[str, LoggedCore], max_steps: int = MAX_STEPS) -> None:
        self.models = list(cores)
        self.steps: deque[StepTimes] = deque(maxlen=max_steps)
        self.num_steps = 0
        self.device_end = 0.0  # of the last step
        for index, core in enumerate(cores.values()):
            core.step_log = LaneLog(self, index, core)

    def since(self, number: int) -> list[StepTimes]:
        """The steps from this number on, as far as they are kept."""
        missing = self.num_steps - max(number, 0)
        if missing >= len(self.steps):
            return list(self.steps)
        return [self.steps[index] for index in range(len(self.steps) - missing, len(self.steps))]


class LaneLog:
    """Adds the steps of one core to a log."""

    def __init__(self, log: StepLog, index: int, core: LoggedCore, clock: Callable[[], float] = time.time) -> None:
        self._log = log
        self._index = index
        self._scheduler = core.scheduler
        cache = core.scheduler.cache
        self._pool = cache.groups[0].pool if cache is not None and cache.groups else None
        self._clock = clock
        self._pending: deque[tuple[float, float, int, int, int, int]] = deque()
        self._drafts: deque[Ints | None] = deque()  # of steps without a result: drafts of each row that draws
        self._accepted: deque[tuple[int, int]] = deque()  # of steps with a result: number of drafts, and accepted ones
        self._skipped = core.num_untimed  # steps in flight, of which the launch was not seen
        self._skipped_results = len(core.in_flight)

    def launched(self, plan: StepPlan, host: float) -> None:
        rows, num_host = len(plan.rows), len(plan.tokens)
        tokens = drawn = rows  # of a decode step; sums of arrays take as long as the rest of the log
        if num_host or plan.has_drafts:
            tokens, drawn = plan.total_tokens, int(plan.num_drawn.sum())
        self._pending.append((self._clock(), host, rows, tokens, num_host, drawn))
        self._drafts.append(plan.num_drawn[plan.num_drawn > 0] - 1 if plan.has_drafts else None)

    def committed(self, result: StepResult) -> None:
        """The result of the oldest step without one."""
        if self._skipped_results:
            self._skipped_results -= 1
            return
        drafts = self._drafts.popleft()
        if drafts is None or result.counts is None:
            self._accepted.append((0, 0))
        else:
            accepted = np.minimum(drafts, np.maximum(result.counts - 1, 0))
            self._accepted.append((int(drafts.sum()), int(accepted.sum())))

    def ended(self, busy: float, gap: float, late: float, cause: str) -> None:
        """The oldest step has ended. Its device times are zero on a device without a clock."""
        if self._skipped:
            self._skipped -= 1
            return
        log, pool, scheduler = self._log, self._pool, self._scheduler
        launched, host, rows, tokens, num_host, drawn = self._pending.popleft()
        drafts, accepted = self._accepted.popleft() if self._accepted else (0, 0)
        # not before the launch began, and not so late that the step would still run
        latest = self._clock() - busy - late
        if log.device_end:  # a guess: where it was late, this step begins at once
            start = max(log.device_end, min(max(log.device_end + gap, launched - host), latest))
        else:
            start = min(launched, latest)
        log.device_end = end = start + busy + late
        log.steps.append(
            StepTimes(
                log.num_steps, self._index, launched, host, start, end, gap, cause, late, rows, tokens, num_host, drawn,
                scheduler.num_running, scheduler.num_waiting,
                0 if pool is None else pool.num_free, 0 if pool is None else pool.num_usable, drafts, accepted,
            )
        )  # fmt: skip
        log.num_steps += 1


def stop(cores: Mapping[str, LoggedCore]) -> None:
    """Ends logging."""
    for core in cores.values():
        core.step_log = None


# Writes logged steps in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

_HOST, _DEVICE, _IDLE = 1, 2, 3  # threads of the trace
_TEXTS = {
    "turnaround": "turnaround",
    "host_late": "idle: the host was late",
    "output": "idle: the caller was late",
    "no_requests": "idle: no requests",
}


def chrome_trace(models: Sequence[str], steps: Sequence[StepTimes]) -> bytes:
    """A JSON document with one lane for the host, one for the device and one for its idle gaps."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "slipstream"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
            for tid, name in ((_HOST, "host"), (_DEVICE, "device"), (_IDLE, "device idle"))
        ),
    ]
    origin = min((min(step.launched - step.host, step.start - step.gap) for step in steps), default=0.0)
    last_end = origin
    for step in steps:
        args = {
            "step": step.number,
            "model": models[step.lane],
            "rows": step.rows,
            "tokens": step.tokens,
            "prefill_tokens": step.prefill_tokens,
            "drawn": step.drawn,
            "running": step.running,
            "waiting": step.waiting,
            **({"drafts": step.drafts, "accepted": step.accepted} if step.drafts else {}),
        }
        events.append(_slice(_HOST, f"launch {step.number}", step.launched - step.host, step.host, origin, args))
        name = "prefill" if step.prefill_tokens else "decode"
        events.append(_slice(_DEVICE, f"{name} {step.rows} rows", step.start, step.end - step.start, origin, args))
        if step.gap > 0:
            begin = max(step.start - step.gap, last_end)  # the two clocks may differ slightly
            details = {"cause": step.cause, "step": step.number, "seconds": step.gap}
            events.append(_slice(_IDLE, _TEXTS[step.cause], begin, step.start - begin, origin, details))
        if step.late > 0:
            details = {"cause": "grammar", "step": step.number, "seconds": step.late}
            events.append(_slice(_IDLE, "idle: late masks", step.end - step.late, step.late, origin, details))
        counts = {"running": step.running, "waiting": step.waiting}
        events.append({"ph": "C", "name": "requests", "pid": 1, "ts": _us(step.start - origin), "args": counts})
        if step.num_pages:
            used = {"used": step.num_pages - step.free_pages}
            events.append({"ph": "C", "name": "pages", "pid": 1, "ts": _us(step.start - origin), "args": used})
        last_end = step.end
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _slice(tid: int, name: str, start: float, seconds: float, origin: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": _us(start - origin),
        "dur": _us(max(0.0, seconds)),
        "args": args,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
