"""LockstepExecutor: launches the steps of an engine together with those of the engines that share its experts.

The sizes of a plan are posted when the plan arrives (`dist/step_exchange.py`). The plan is launched when the sizes of
all other engines for the same step are there: at the next call that finds them, at the latest when the next plan
arrives or the core waits for the result. Steps that were launched before run on the device meanwhile, so in steady
state the host waits for the device only. An engine without a plan launches a padding step for each step of the others.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from slipstream.contracts.step import NO_INTS, NO_PAGES, Handle, Late, LateBias, StepPlan, StepResult, StepSizes
from slipstream.device.collectives import Group
from slipstream.dist.step_exchange import StepExchange
from slipstream.engine.device_timing import Point, StepInterval
from slipstream.engine.rank_watch import CLOSED_BY_PEER, RankWatch, wait_for_step

_POLL_SECONDS = 0.001  # while the host waits for the device and sizes of the next step are missing


class SizedRunner(Protocol):
    """The part of ModelRunner that a LockstepExecutor uses."""

    def sizes_of(self, plan: StepPlan) -> StepSizes: ...
    def launch(self, plan: StepPlan) -> None: ...
    def finish(self, late: Late | None = None) -> Handle: ...
    def free_queries(self, queries: tuple[int, ...]) -> None: ...
    def close(self) -> None: ...


class LockstepExecutor:
    def __init__(
        self, runner: SizedRunner, exchange: StepExchange, num_groups: int, group: Group | None = None
    ) -> None:
        """`num_groups`: cache groups of a plan. `group`: its collectives are ended when an engine ends."""
        self.runner = runner
        self.exchange = exchange
        self.group = group
        self.is_broken = False  # set by the thread that waits for the end of another engine
        self._watch = RankWatch(exchange.files, self._break, CLOSED_BY_PEER)
        self._last: Handle | None = None  # the newest step that was launched
        self.num_padding_steps = 0
        self._padding = padding_plan(num_groups)
        self._next: LockstepHandle | None = None  # posted; launched and finished by `advance`

    # Of the core

    def launch(self, plan: StepPlan) -> None:
        self._post(plan)

    def finish(self, late: Late | None = None) -> LockstepHandle:
        handle = self._next
        assert handle is not None, "finish comes after launch"
        handle.late_data, handle.is_ready = late, True
        self.advance()
        if handle.step is None and late is not None:
            handle.late_data = _copied(late)
        return handle

    def free_queries(self, queries: tuple[int, ...]) -> None:
        self.runner.free_queries(queries)

    def close(self) -> None:
        wait_for_step(self._last)
        self._watch.stop()
        self.exchange.leave()
        if self.group is not None:
            self.group.abort()
        self.runner.close()

    def check(self) -> None:
        """Raises EngineDead if an engine has ended: results that it did not take part in are wrong."""
        if self.is_broken:
            self.exchange.check()

    def _break(self) -> None:
        self.is_broken = True
        if self.group is not None:
            self.group.abort()

    # Of an engine that has nothing to launch

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when `is_waited_for` may have become true."""
        return self.exchange.files

    def is_waited_for(self) -> bool:
        """Whether `follow` has something to do."""
        return self.exchange.is_behind() or (self._next is not None and self.exchange.has_all())

    def follow(self) -> None:
        """Takes part in the next step of the other engines, if they have posted one, with a padding step."""
        self.advance()
        if self.exchange.is_behind():
            self._post(self._padding)
            self.num_padding_steps += 1
            self.finish()

    # Of both

    def advance(self, *, wait: bool = False) -> None:
        """Launches and finishes the posted plan as far as possible; `wait`: waits for sizes of other engines."""
        handle = self._next
        if handle is None:
            return
        if not handle.is_launched and (wait or self.exchange.has_all()):
            sizes = self.exchange.take(handle.sizes)
            handle.is_launched = True
            self.runner.launch(dataclasses.replace(handle.plan, joint_sizes=sizes))
        if handle.is_launched and handle.is_ready:
            self._next = None
            handle.step = self._last = self.runner.finish(handle.late_data)

    def wait_for_device(self, step: Handle) -> None:
        """Returns when `step` has ended, or when nothing more can be launched meanwhile."""
        self.advance()
        while self._next is not None and not self._next.is_launched and not step.done():
            self.exchange.sleep(_POLL_SECONDS)
            self.advance()

    def _post(self, plan: StepPlan) -> None:
        self.advance(wait=True)
        assert self._next is None, "a step was launched before the one before it was finished"
        sizes = self.runner.sizes_of(plan)
        self.exchange.post(sizes)
        self._next = LockstepHandle(self, plan, sizes)


class LockstepHandle:
    """A step that may not be launched yet."""

    def __init__(self, owner: LockstepExecutor, plan: StepPlan, sizes: StepSizes) -> None:
        self.owner = owner
        self.plan = plan
        self.sizes = sizes
        self.late_data: Late | None = None
        self.is_launched = False
        self.is_ready = False  # `finish` was called: late data is known
        self.step: Handle | None = None  # once launched and finished

    def wait(self) -> StepResult:
        step = self._launched()
        self.owner.wait_for_device(step)
        result = step.wait()
        self.owner.check()
        return result

    def done(self) -> bool:
        self.owner.advance()
        return self.step is not None and self.step.done()

    def wait_until_ended(self) -> None:
        step = self._launched()
        self.owner.wait_for_device(step)
        step.wait_until_ended()
        self.owner.check()

    @property
    def has_no_result(self) -> bool:
        return bool(getattr(self._launched(), "has_no_result", False))

    @property
    def span(self) -> StepInterval | None:
        return _LaterSpan(self) if self.step is None else getattr(self.step, "span", None)

    def _launched(self) -> Handle:
        if self.step is None:
            self.owner.advance(wait=True)
        assert self.step is not None, "a step waits for its late data"
        return self.step


class _LaterSpan:
    """The events of a step that is launched later. The device timer reads `ended.done()` at any time, and times once
    the step has ended."""

    def __init__(self, handle: LockstepHandle) -> None:
        self._handle = handle

    @property
    def started(self) -> Point:
        return self._span().started

    @property
    def ended(self) -> Point:
        if self._handle.step is None:
            return _NotReached()
        return self._span().ended

    @property
    def late(self) -> tuple[Point, Point] | None:
        return self._span().late

    def _span(self) -> StepInterval:
        span: StepInterval | None = getattr(self._handle.step, "span", None)
        return _NO_TIMES if span is None else span


class _NotReached:
    def done(self) -> bool:
        return False

    def since(self, earlier: Point) -> float:
        raise AssertionError("the time of an event is read before the event")


class _Untimed:
    """An event of a device without a clock, and the span of a step there."""

    late = None

    def done(self) -> bool:
        return True

    def since(self, earlier: Point) -> float:
        return 0.0

    @property
    def started(self) -> Point:
        return self

    @property
    def ended(self) -> Point:
        return self


_NO_TIMES = _Untimed()


def _copied(late: Late) -> Late:
    """The owner of the arrays reuses them after `finish`, and the step is launched later."""
    bias, offsets = late.bias, late.offsets
    return dataclasses.replace(
        late,
        rows=late.rows.copy(),
        bits=late.bits.copy(),
        bias=None if bias is None else LateBias(bias.rows.copy(), bias.ids.copy(), bias.values.copy()),
        offsets=None if offsets is None else offsets.copy(),
    )


def padding_plan(num_groups: int) -> StepPlan:
    """A plan without rows: the device computes padding only, and no token is drawn."""
    return StepPlan(
        step=0,
        released=NO_INTS,
        admitted=(),
        rows=NO_INTS,
        num_tokens=NO_INTS,
        lengths=NO_INTS,
        num_drawn=NO_INTS,
        num_host_tokens=NO_INTS,
        tokens=NO_INTS,
        new_pages=(NO_PAGES,) * num_groups,
    )
