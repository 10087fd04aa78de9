"""Answers a front end's questions about the steps of a core: the flight recorder's file, and times of steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from slipstream.engine.lanes import Lanes
from slipstream.engine.step_log import StepLog, StepTimes, stop
from slipstream.transport.frames import Inspect, Inspected

KEPT_SECONDS = 30.0  # a step log without a reader is dropped after this time


class StepTable(msgspec.Struct, array_like=True):
    """Steps of all models."""

    models: list[str]
    next: int  # number of the next step
    steps: list[StepTimes]


class Inspector:
    def __init__(self, lanes: Lanes, clock: Callable[[], float] = time.monotonic) -> None:
        self._lanes = lanes
        self._clock = clock
        self._log: StepLog | None = None
        self._read = 0.0  # when the log was read last

    def answer(self, message: Inspect) -> Inspected:
        try:
            return Inspected(message.call, self._find(message))
        except Exception as error:  # a question must not end the engine
            return Inspected(message.call, b"", f"{type(error).__name__}: {error}")

    def drop_unread(self) -> None:
        """Stops logging where no front end has read the log for a while."""
        if self._log is not None and self._clock() - self._read > KEPT_SECONDS:
            stop(self._lanes.cores)
            self._log = None

    def _find(self, message: Inspect) -> bytes:
        if message.what == "steps":
            return self._steps(message.since)
        name = message.model or next(iter(self._lanes.cores))
        core = self._lanes.cores.get(name)
        if core is None:
            raise ValueError(f"there is no model {name}")
        if core.recorder is None:
            raise ValueError("nothing is recorded; start the engine with record_steps above 0")
        return core.recorder.take().encode(redact=message.redact)

    def _steps(self, since: int) -> bytes:
        self._read = self._clock()
        if self._log is None:
            self._log = StepLog(self._lanes.cores)
        log = self._log
        # a number beyond the last step is from an older log: start from the beginning of this one
        steps = [] if since < 0 else log.since(since if since <= log.num_steps else 0)
        return msgspec.msgpack.encode(StepTable(log.models, log.num_steps, steps))
