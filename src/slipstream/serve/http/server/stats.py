"""ServerStats: the counters of all front ends of this server, for /metrics and for the status line in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import slipstream
from slipstream.base.errors import SlipstreamError
from slipstream.front.async_engine import AsyncEngine
from slipstream.metrics.stats import (
    FrontEnds,
    FrontStats,
    LaneStats,
    ModelStats,
    ReplicaStats,
    SharedCounters,
    StatusLine,
    log,
)
from slipstream.serve.http.server.errors import HTTPException

if TYPE_CHECKING:
    from slipstream.metrics.prometheus import Metrics


WRITE_SECONDS = 0.5  # interval at which a front end publishes its counters to the others


class Counters:
    """Counts of HTTP requests of this front end. `AsyncEngine.stats` has tokens and times."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.aborted: Counter[str] = Counter()  # by cause: disconnect, deadline, body_timeout, drain, admin
        self.refused: Counter[str] = Counter()  # by cause: queue_full, bodies_full, not_ready, draining
        self.turns = Turns()


class ServerStats:
    """With several front ends, `run` publishes the counters of this one in shared memory."""

    def __init__(
        self, engine: AsyncEngine, counters: Counters, shared: SharedCounters | None, status_interval: float
    ) -> None:
        """`shared`: shared memory of all front ends, None if this is the only one. `status_interval`: seconds between
        two status lines, 0 for none."""
        self.engine = engine
        self.counters = counters
        self.shared = shared
        self._status_interval = status_interval
        self._metrics: Metrics | None = None

    def read(self) -> tuple[FrontStats, Sequence[LaneStats]]:
        """Returns the totals of all front ends, and the statistics of the core's lanes."""
        own = self._own()
        if self.shared is None:
            return own, self.engine.pulse.lanes
        self.shared.write(own)
        return self.shared.total(), self.engine.pulse.lanes

    def front_ends(self) -> FrontEnds | None:
        """The number of front-end processes; None if this is the only one."""
        return None if self.shared is None else self.shared.front_ends()

    def replicas(self) -> Sequence[ReplicaStats]:
        return self.engine.pulse.replicas

    def text(self, accept: str) -> tuple[bytes, str]:
        """Returns the body of /metrics and its content type."""
        if self._metrics is None:
            from slipstream.metrics.prometheus import Metrics  # imported at the first scrape: it is slow to load

            self._metrics = Metrics(self.read, slipstream.__version__, self.front_ends, self.replicas)
        return self._metrics.text(accept)

    async def run(self) -> None:
        """Publishes the counters of this front end, and logs a status line at each interval."""
        interval = self._status_interval
        line, due = StatusLine(), time.monotonic() + interval
        logs_status = interval > 0 and (self.shared is None or self.shared.own == 0)
        line.look(time.monotonic(), *self.read())
        while True:
            await asyncio.sleep(WRITE_SECONDS if self.shared is not None else max(interval, 0.01))
            with self.counters.turns.turn("statistics"):
                if self.shared is not None:
                    self.shared.write(self._own())
                if logs_status and (now := time.monotonic()) >= due - 0.01:
                    due = now + interval
                    if (text := line.look(now, *self.read())) is not None:
                        log.info("%s", text)

    def _own(self) -> FrontStats:
        counters, engine = self.counters, self.engine
        load = engine.load
        return FrontStats(
            requests={f"{route} {status}": count for (route, status), count in counters.requests.items()},
            aborted=dict(counters.aborted),
            refused=dict(counters.refused),
            models={name: engine.stats.setdefault(name, ModelStats()) for name in engine.models},
            open_requests=load.num_open,
            queued_requests=load.num_not_started,
            queued_tokens=load.queued_tokens,
            pids=self._pids(),
            failed_turns=dict(counters.turns.failures),
            failing=counters.turns.failing,
        )

    def _pids(self) -> dict[str, int]:
        """Process ids by role. Only the first front end reports those of the core and the supervisor."""
        number = 0 if self.shared is None else self.shared.own
        pids = {f"front_end_{number}": os.getpid()}
        if self.shared is not None and number == 0:
            pids["supervisor"] = os.getppid()
        if number == 0:
            pids |= self.engine.core_pids()
        return pids


# Turns: the repeated work of a front end, such as running batches.
#
# A turn that fails is logged and counted, /health and /metrics say so until a later one succeeds, and the loop goes on.

http_log = logging.getLogger("slipstream.http")

_AGAIN_SECONDS = 60.0  # between two lines of the log about the same failure


def is_failure(error: BaseException) -> bool:
    """Whether the exception is no end of the current task on purpose. Panics of native code are no Exception; a
    CancelledError without a cancellation of the task is that of a future."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


class Turns:
    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # turns that failed, by task
        self._failing: dict[
            tuple[str, str], tuple[str, float]
        ] = {}  # by task and part: the failure, when it was logged

    @property
    def failing(self) -> dict[str, int]:
        """The tasks whose last turn failed, as counts of their parts."""
        return dict(Counter(task for task, _ in self._failing))

    def turn(self, task: str, part: str = "", kind: type[BaseException] = BaseException) -> _Turn:
        """A context manager around one turn of a task, which keeps back failures of this class. `part`: of a task of
        which several parts may fail at the same time."""
        return _Turn(self, task, part, kind)

    def end(self, task: str, start: str) -> None:
        """Parts whose names begin like this have ended: they do not count as failing."""
        for name in [name for name in self._failing if name[0] == task and name[1].startswith(start)]:
            del self._failing[name]

    def succeeded(self, task: str, part: str) -> None:
        if self._failing.pop((task, part), None) is not None:
            http_log.warning("%s: works again", _named(task, part))

    def failed(self, task: str, part: str, error: BaseException) -> None:
        self.failures[task] += 1
        text, now = f"{type(error).__name__}: {error}", time.monotonic()
        before, logged = self._failing.get((task, part), ("", 0.0))
        trace = None if isinstance(error, HTTPException | SlipstreamError) else error  # those say all in their text
        if text != before:
            http_log.error("%s: a turn failed and is tried again: %s", _named(task, part), text, exc_info=trace)
        elif now >= logged + _AGAIN_SECONDS:
            http_log.error("%s: turns still fail: %s", _named(task, part), text)
        else:
            now = logged
        self._failing[task, part] = text, now


class _Turn:
    def __init__(self, turns: Turns, task: str, part: str, kind: type[BaseException]) -> None:
        self._turns = turns
        self._name = task, part
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._turns.succeeded(*self._name)
            return False
        is_kept = isinstance(error, self._kind) and is_failure(error)
        if is_kept:
            self._turns.failed(*self._name, error)
        return is_kept


def _named(task: str, part: str) -> str:
    return f"{task}, {part}" if part else task
