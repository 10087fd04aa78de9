"""Where the device's time goes: busy with steps, or idle, and then for whose sake."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

Clock = Callable[[], float]


class DeviceTime(msgspec.Struct):
    """Seconds on the device's clock, since the engine's first step."""

    num_steps: int = 0
    busy: float = 0.0
    turnaround: float = 0.0  # from one step to the next that was waiting for it
    host_late: float = 0.0  # the next step was not planned and launched in time
    output: float = 0.0  # whoever takes the results, or gives the prompts, kept the core from stepping
    grammar: float = 0.0  # the next tokens' masks were not there yet
    no_work: float = 0.0
    host: float = 0.0  # the core's own time, on the host's clock: planning, launching, committing

    @property
    def idle(self) -> float:
        """While there was work."""
        return self.turnaround + self.host_late + self.output + self.grammar

    @property
    def busy_share(self) -> float:
        """Of the time in which there was work."""
        return self.busy / (self.busy + self.idle) if self.busy else 0.0

    def since(self, earlier: DeviceTime) -> DeviceTime:
        return DeviceTime(*(getattr(self, name) - getattr(earlier, name) for name in self.__struct_fields__))

    def copy(self) -> DeviceTime:
        return msgspec.structs.replace(self)


class Point(Protocol):
    """A point in the device's work."""

    def done(self) -> bool: ...
    def since(self, earlier: Point) -> float: ...


class StepInterval(Protocol):
    """A step on the device: where it begins and ends."""

    @property
    def started(self) -> Point: ...
    @property
    def ended(self) -> Point: ...


class DeviceTimer:
    """Books every step of a core. Asks the device nothing it has not answered already, and never waits.

    Why a gap came about is settled when the step after it is launched. If the step before is still on the device then,
    the gap is the device's own. Else the host was late: a core, or whoever called it, by whose part since the launch
    before was longer. Cores that share a device share its `Timeline`, and a gap begins where any of them left off.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.total = DeviceTime()
        self.timeline = Timeline(clock)
        self._before: deque[StepInterval | None] = deque()  # what the device did before each of the steps under way
        self.host_seconds = 0.0  # that was taken from one launch to the last one

    def enter(self) -> None:
        """The core begins to step, or goes on."""
        line = self.timeline
        line.outside += line.lap()
        line.working.add(self)

    def leave(self, has_work: bool) -> None:
        """The core gives its caller a turn, maybe in the middle of a step."""
        self._pause()
        if not has_work:
            self.rest()

    def rest(self) -> None:
        """Nobody wants anything of the core."""
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
        """A step's first work was queued: under what to book the gap before it."""
        self._pause()
        line = self.timeline
        if line.last is not None and not line.last.ended.done():
            cause = "turnaround"
        elif line.ran_dry:
            cause = "no_work"
        else:
            cause = "output" if line.outside > line.inside else "host_late"
        line.ran_dry = False
        self.host_seconds = line.inside
        line.inside = line.outside = 0.0
        return cause

    def follow(self, span: StepInterval | None) -> None:
        """The step launched last is this one."""
        self._before.append(self.timeline.last)
        self.timeline.last = span

    def book(self, span: StepInterval | None, cause: str) -> float:
        """The oldest step has ended. Returns how long it was on the device."""
        before = self._before.popleft()
        if span is None:
            return 0.0
        total, busy = self.total, span.ended.since(span.started)
        total.num_steps += 1
        total.busy += busy
        if before is not None:
            # the clocks' grain may make a gap negative
            setattr(total, cause, getattr(total, cause) + max(0.0, span.started.since(before.ended)))
        return busy


class Timeline:
    """One device's work in the order of its launches, and what the host did since the last of them."""

    def __init__(self, clock: Clock) -> None:
        self.last: StepInterval | None = None  # launched
        self.inside = self.outside = 0.0  # of the cores, since the last launch
        self.ran_dry = True  # since the last launch there was a time with nothing to do
        self.working: set[DeviceTimer] = set()  # those that have something to do
        self._clock = clock
        self._mark = clock()

    def lap(self) -> float:
        """Seconds since this was last asked."""
        before, self._mark = self._mark, self._clock()
        return self._mark - before

    def rest(self, account: DeviceTimer) -> None:
        """It has nothing to do."""
        self.working.discard(account)
        self.ran_dry |= not self.working
