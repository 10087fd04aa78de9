"""Callers take turns, whatever amount of work each has queued: `CallerTurns`, and threads that work so.

The next piece of work is of a waiting caller with the fewest pieces that run; among these, of the one whose last piece
ended first. So a caller with none running waits until a thread is free, and for one piece of each other caller.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from slipstream.base.errors import QueueFull

T = TypeVar("T")


class _Caller(Generic[T]):
    __slots__ = ("queued", "num_running", "turn")

    def __init__(self, turn: int) -> None:
        self.queued: dict[object, T] = {}  # by key, the oldest first
        self.num_running = 0
        self.turn = turn  # when it came, or when its last piece ended


class CallerTurns(Generic[T]):
    """A queue per caller. Not locked."""

    def __init__(self, most_running: int) -> None:
        """`most_running`: pieces of one caller at a time."""
        self._most_running = most_running
        self._callers: dict[str, _Caller[T]] = {}
        self._turns = itertools.count()

    def add(self, caller: str, key: object, piece: T) -> None:
        if caller not in self._callers:
            self._callers[caller] = _Caller(next(self._turns))
        self._callers[caller].queued.setdefault(key, piece)

    def num_queued(self, caller: str) -> int:
        own = self._callers.get(caller)
        return 0 if own is None else len(own.queued)

    def discard(self, caller: str, key: object) -> None:
        """Remove a piece, if it is queued."""
        if (own := self._callers.get(caller)) is not None:
            own.queued.pop(key, None)
            self._forget_idle(caller)

    def take(self) -> tuple[str, T] | None:
        """The next piece, and its caller, for whom `end` is called after it."""
        waiting = [
            name for name, each in self._callers.items() if each.queued and each.num_running < self._most_running
        ]
        if not waiting:
            return None
        first = min(waiting, key=lambda name: (self._callers[name].num_running, self._callers[name].turn))
        own = self._callers[first]
        own.num_running += 1
        return first, own.queued.pop(next(iter(own.queued)))

    def end(self, caller: str) -> None:
        if (own := self._callers.get(caller)) is not None:  # else the queue was cleared
            own.num_running -= 1
            own.turn = next(self._turns)
            self._forget_idle(caller)

    def clear(self) -> None:
        self._callers.clear()

    def _forget_idle(self, caller: str) -> None:
        own = self._callers[caller]
        if not own.queued and not own.num_running:
            del self._callers[caller]


class FairThreads:
    """A thread pool for callers that take turns. A future that is cancelled while it waits leaves the queue at once."""

    def __init__(self, count: int, name: str, max_queued: int, what: str) -> None:
        """`max_queued`: calls of one named caller. `what` they are about, for an error."""
        self._pool = ThreadPoolExecutor(count, name)
        self._max_queued = max_queued
        self._what = what
        self._lock = threading.Lock()
        self._turns: CallerTurns[tuple[Future[Any], Callable[[], Any]]] = CallerTurns(count)

    def submit(self, caller: str, function: Callable[[], T]) -> Future[T]:
        """Raises QueueFull if this caller has too many. The empty name is the program itself, without a limit."""
        future: Future[T] = Future()
        with self._lock:
            if caller and self._turns.num_queued(caller) >= self._max_queued:
                raise QueueFull(
                    f"{self._max_queued} {self._what} of this client wait for a thread, the limit; send more when some "
                    "of these requests have their first token"
                )
            self._turns.add(caller, future, (future, function))
        future.add_done_callback(lambda done: self._leave(caller, done))
        self._pool.submit(self._run_next)
        return future

    def close(self) -> None:
        """Waits for calls that run, and cancels the others."""
        waiting = []
        with self._lock:
            while (taken := self._turns.take()) is not None:
                waiting.append(taken[1][0])
            self._turns.clear()
        for future in waiting:
            future.cancel()
        self._pool.shutdown()

    def _leave(self, caller: str, future: Future[Any]) -> None:
        if future.cancelled():
            with self._lock:
                self._turns.discard(caller, future)

    def _run_next(self) -> None:
        with self._lock:
            taken = self._turns.take()
        if taken is None:  # it was cancelled
            return
        caller, (future, function) = taken
        try:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
        finally:
            with self._lock:
                self._turns.end(caller)
            del future, function, taken  # a result is not kept until the next call
