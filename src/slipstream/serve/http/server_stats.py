"""ServerStats: the counters of all front ends of this server, for /metrics and for the status line in the log."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import slipstream
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
from slipstream.serve.http.turns import Turns

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
