"""Turns: the repeated work of a front end, such as running batches.

A turn that fails is logged and counted, /health and /metrics say so until a later one succeeds, and the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from types import TracebackType

from slipstream.base.errors import SlipstreamError
from slipstream.serve.http.errors import HTTPException

log = logging.getLogger("slipstream.http")

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
            log.warning("%s: works again", _named(task, part))

    def failed(self, task: str, part: str, error: BaseException) -> None:
        self.failures[task] += 1
        text, now = f"{type(error).__name__}: {error}", time.monotonic()
        before, logged = self._failing.get((task, part), ("", 0.0))
        trace = None if isinstance(error, HTTPException | SlipstreamError) else error  # those say all in their text
        if text != before:
            log.error("%s: a turn failed and is tried again: %s", _named(task, part), text, exc_info=trace)
        elif now >= logged + _AGAIN_SECONDS:
            log.error("%s: turns still fail: %s", _named(task, part), text)
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
