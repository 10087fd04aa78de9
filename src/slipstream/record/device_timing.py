"""Device time accounting: busy time per step, idle time per cause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the command line reads DeviceTime, without numpy
    from slipstream.contracts.step import StepInterval

Clock = Callable[[], float]


class DeviceTime(msgspec.Struct):
    """Seconds on the device's clock since the engine's first step."""

    num_steps: int = 0
    busy: float = 0.0
    turnaround: float = 0.0  # between a step and the next one that was launched in time
    host_late: float = 0.0  # the next step was not launched in time
    output: float = 0.0  # the caller, which reads results or supplies prompts, delayed the core
    grammar: float = 0.0  # between a step's forward and its head: masks or edits of logits processors came late
    no_requests: float = 0.0
    host: float = 0.0  # the core's own time on the host's clock: planning, launching, committing

    @property
    def idle(self) -> float:
        """Idle seconds while there were requests."""
        return self.turnaround + self.host_late + self.output + self.grammar

    @property
    def busy_share(self) -> float:
        """Busy share of the time in which there were requests."""
        return self.busy / (self.busy + self.idle) if self.busy else 0.0

    def since(self, earlier: DeviceTime) -> DeviceTime:
        return DeviceTime(*(getattr(self, name) - getattr(earlier, name) for name in self.__struct_fields__))

    def copy(self) -> DeviceTime:
        return msgspec.structs.replace(self)


class DeviceTimer:
    """Accounts for every step of a core. Reads only events that have passed, and never waits.

    The cause of a gap is decided when the step after it is launched. If the step before is still running then, the gap
    is the device's turnaround. Otherwise the host was late: the core or its caller, whichever used more time since the
    launch before. Cores that share a device share its `Timeline`, and a gap begins at the last step of any of them.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.total = DeviceTime()
        self.timeline = Timeline(clock)
        self._before: deque[StepInterval | None] = deque()  # for each step in flight: the step before it on the device
        self.host_seconds = 0.0  # host seconds between the last two launches
        self.gap = self.late = 0.0  # idle seconds before and within the step recorded last

    def enter(self) -> None:
        """The core starts or continues a step."""
        timeline = self.timeline
        timeline.outside += timeline.lap()
        timeline.working.add(self)

    def leave(self, has_requests: bool) -> None:
        """The core returns to its caller, possibly in the middle of a step."""
        self._pause()
        if not has_requests:
            self.rest()

    def rest(self) -> None:
        """The core has no requests."""
        self.timeline.rest(self)

    def waits(self) -> None:
        """The core is about to wait for the device."""
        self._pause()

    def waited(self) -> None:
        self.timeline.lap()

    def _pause(self) -> None:
        seconds = self.timeline.lap()
        self.timeline.inside += seconds
        self.total.host += seconds

    def launched(self) -> str:
        """The first work of a step was queued. Returns the cause of the gap before it."""
        self._pause()
        timeline = self.timeline
        if timeline.last is not None and not timeline.last.ended.done():
            cause = "turnaround"
        elif timeline.had_no_requests:
            cause = "no_requests"
        else:
            cause = "output" if timeline.outside > timeline.inside else "host_late"
        timeline.had_no_requests = False
        self.host_seconds = timeline.inside
        timeline.inside = timeline.outside = 0.0
        return cause

    def follow(self, interval: StepInterval | None) -> None:
        """`interval` is the step that was launched last."""
        self._before.append(self.timeline.last)
        self.timeline.last = interval

    def record(self, interval: StepInterval | None, cause: str) -> float:
        """The oldest step has ended. Returns its busy seconds on the device."""
        before = self._before.popleft()
        self.gap = self.late = 0.0
        if interval is None:
            return 0.0
        total, busy = self.total, interval.ended.since(interval.started)
        if interval.late is not None:
            self.late = max(0.0, interval.late[1].since(interval.late[0]))
            total.grammar += self.late
            busy -= self.late
        total.num_steps += 1
        total.busy += busy
        if before is not None:
            # the resolution of the clock may make a gap negative
            self.gap = max(0.0, interval.started.since(before.ended))
            setattr(total, cause, getattr(total, cause) + self.gap)
        return busy


class Timeline:
    """One device's steps in the order of their launches, and host times since the last launch."""

    def __init__(self, clock: Clock) -> None:
        self.last: StepInterval | None = None  # the step launched last
        self.inside = self.outside = 0.0  # host seconds inside and outside the cores since the last launch
        self.had_no_requests = True  # whether there was a time without requests since the last launch
        self.working: set[DeviceTimer] = set()  # timers of cores with requests
        self._clock = clock
        self._last_lap = clock()

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self._last_lap = self._last_lap, self._clock()
        return self._last_lap - before

    def rest(self, timer: DeviceTimer) -> None:
        """The core of this timer has no requests."""
        self.working.discard(timer)
        self.had_no_requests |= not self.working
