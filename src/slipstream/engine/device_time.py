"""Where the device's time goes: busy with steps, or idle, and then for whose sake."""

from __future__ import annotations

import time
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
    output: float = 0.0  # whoever takes the results kept the core from stepping
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


class Span(Protocol):
    """A step on the device: where it begins and ends."""

    @property
    def started(self) -> Point: ...
    @property
    def ended(self) -> Point: ...


class Account:
    """Books every step of a core. Asks the device nothing it has not answered already, and never waits.

    Why a gap came about is settled when the step after it is launched. If the step before is still on the device then,
    the gap is the device's own. Else the host was late: the core itself, or whoever called it, by whose part since the
    launch before was longer.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.total = DeviceTime()
        self._clock = clock
        self._last: Span | None = None  # launched
        self._before: Point | None = None  # the end of the step booked last
        self._ran_dry = True  # since the last launch there was a time with nothing to do
        self._inside = self._outside = 0.0  # since the last launch
        self.host_seconds = 0.0  # that the core took from one launch to the last one
        self._mark = clock()

    def enter(self) -> None:
        """The core begins to step."""
        now = self._clock()
        self._outside += now - self._mark
        self._mark = now

    def leave(self, has_work: bool) -> None:
        """The core gives its caller a turn."""
        self._pause()
        self._ran_dry |= not has_work

    def waits(self) -> None:
        """The core is about to wait for the device."""
        self._pause()

    def waited(self) -> None:
        self._mark = self._clock()

    def _pause(self) -> None:
        now = self._clock()
        self._inside += now - self._mark
        self.total.host += now - self._mark
        self._mark = now

    def launched(self) -> str:
        """A step's first work was queued: under what to book the gap before it."""
        self._pause()
        if self._ran_dry:
            cause = "no_work"
        elif self._last is not None and not self._last.ended.done():
            cause = "turnaround"
        else:
            cause = "output" if self._outside > self._inside else "host_late"
        self._ran_dry = False
        self.host_seconds = self._inside
        self._inside = self._outside = 0.0
        return cause

    def follow(self, span: Span | None) -> None:
        """The step launched last is this one."""
        self._last = span

    def book(self, span: Span | None, cause: str) -> float:
        """A step's result is there. Returns how long it was on the device."""
        if span is None:
            return 0.0
        total, busy = self.total, span.ended.since(span.started)
        total.num_steps += 1
        total.busy += busy
        if self._before is not None:
            # the clocks' grain may make a gap negative
            setattr(total, cause, getattr(total, cause) + max(0.0, span.started.since(self._before)))
        self._before = span.ended
        return busy
