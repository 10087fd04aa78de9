"""Watchdog: detects an engine that was sent requests and sends no messages."""

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
    """When the core has sent nothing for `seconds` since it had requests, the stacks of both processes are logged and
    /health returns 503, until the core sends a message again."""

    def __init__(self, state: State, seconds: float) -> None:
        self.state = state
        self.seconds = seconds
        self._owed_since: float | None = None  # monotonic seconds since when the core owes a message

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.seconds / 4))
            with self.state.counters.turns.turn("watchdog"):
                self.check(time.monotonic())

    def check(self, now: float) -> None:
        engine = self.state.engine
        if engine.failure is not None or engine.pulse.is_asleep:
            self._owed_since = self.state.stalled = None
            return
        if self._owed_since is None or engine.last_message_time > self._owed_since:
            self._owed_since = now if engine.load.num_open else None
        # without open requests it stays set: the core answers the abort of a request with statistics
        silent = 0.0 if self._owed_since is None else now - self._owed_since
        if silent < self.seconds:
            self.state.stalled = None
        elif self.state.stalled is None:
            self.state.stalled = f"the engine has had requests and has sent nothing for {silent:.0f} s"
            log.error("%s; stacks follow", self.state.stalled)
            self._dump_stacks()

    def _dump_stacks(self) -> None:
        faulthandler.dump_traceback(all_threads=True)
        for pid in self.state.engine.core_pids().values():
            try:
                os.kill(pid, signal.SIGUSR1)  # faulthandler of the core writes its stacks
            except ProcessLookupError:
                pass  # it has exited; the closed socket will be noticed
