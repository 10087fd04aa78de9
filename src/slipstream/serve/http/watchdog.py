"""Watchdog: notices an engine that has work and says nothing."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import time

from slipstream.serve.http.state import State

log = logging.getLogger("slipstream.http")


class Watchdog:
    """Once the core has been silent that long while requests are open, stacks of both processes go to the log and
    /health turns. It turns back if the core speaks again."""

    def __init__(self, state: State, seconds: float) -> None:
        self.state = state
        self.seconds = seconds
        self._busy_since: float | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.seconds / 4))
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        engine = self.state.engine
        if not engine.load.num_open or engine.failure is not None:
            self._busy_since = self.state.stalled = None
            return
        if self._busy_since is None:
            self._busy_since = now
        silent = now - max(self._busy_since, engine.heard)
        if silent < self.seconds:
            self.state.stalled = None
        elif self.state.stalled is None:
            self.state.stalled = f"the engine has had work and said nothing for {silent:.0f} s"
            log.error("%s; stacks follow", self.state.stalled)
            self._dump()

    def _dump(self) -> None:
        faulthandler.dump_traceback(all_threads=True)
        if (pid := self.state.engine.core_pid) is not None:
            try:
                os.kill(pid, signal.SIGUSR1)  # the core writes its own
            except ProcessLookupError:
                pass  # its end is on its way to us
