"""Report: what all front ends of this server have counted, for /metrics and for the status line in the log."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import slipstream
from slipstream.metrics.board import Board
from slipstream.metrics.lane import LaneStats
from slipstream.metrics.stats import FrontEnds, FrontStats, ModelStats
from slipstream.metrics.status import StatusLine, log

if TYPE_CHECKING:
    from slipstream.metrics.prometheus import Metrics
    from slipstream.serve.http.state import State

WRITE_SECONDS = 0.5  # between two times that a front end tells the others


class Report:
    """What all front ends together have counted. Kept up by `run` where there are several."""

    def __init__(self, state: State, board: Board | None) -> None:
        self.state = state
        self.board = board
        self._metrics: Metrics | None = None

    def look(self) -> tuple[FrontStats, Sequence[LaneStats]]:
        own = self._own()
        if self.board is None:
            return own, self.state.engine.pulse.lanes
        self.board.write(own)
        return self.board.total(), self.state.engine.pulse.lanes

    def front_ends(self) -> FrontEnds | None:
        """How many processes serve; None where this one does alone."""
        return None if self.board is None else self.board.front_ends()

    def text(self, accept: str) -> tuple[bytes, str]:
        if self._metrics is None:
            from slipstream.metrics.prometheus import Metrics  # a server that nobody asks need not load it

            self._metrics = Metrics(self.look, slipstream.__version__, self.front_ends)
        return self._metrics.text(accept)

    async def run(self) -> None:
        """Tells the others what this one has counted, and writes a line of status now and then."""
        interval = self.state.settings.status_interval
        line, due = StatusLine(), time.monotonic() + interval
        says = interval > 0 and (self.board is None or self.board.own == 0)
        line.look(time.monotonic(), *self.look())
        while True:
            await asyncio.sleep(WRITE_SECONDS if self.board is not None else max(interval, 0.01))
            if self.board is not None:
                self.board.write(self._own())
            if says and (now := time.monotonic()) >= due - 0.01:
                due = now + interval
                if (text := line.look(now, *self.look())) is not None:
                    log.info("%s", text)

    def _own(self) -> FrontStats:
        counters, engine = self.state.counters, self.state.engine
        load = engine.load
        return FrontStats(
            requests={f"{route} {status}": count for (route, status), count in counters.requests.items()},
            aborted=dict(counters.aborted),
            refused=dict(counters.refused),
            models={name: engine.stats.setdefault(name, ModelStats()) for name in engine.models},
            open_requests=load.num_open,
            queued_requests=load.num_waiting,
            queued_tokens=load.queued_tokens,
            pids=self._pids(),
        )

    def _pids(self) -> dict[str, int]:
        """Of this front end, and of the core where the first of them tells."""
        number = 0 if self.board is None else self.board.own
        pids = {f"front_end_{number}": os.getpid()}
        if self.board is not None and number == 0:
            pids["supervisor"] = os.getppid()
        if number == 0 and (core := self.state.engine.core_pid) is not None:
            pids["core"] = core
        return pids
